from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

CHAT = ["trl>=1", "peft", "transformers>=4.46"]  # the recipe of docs/huggingface.md
EVAL = ["lm_eval~=0.4.13", "accelerate", "transformers>=4.46"]
PLOT = ["matplotlib", "jinja2"]
VISION = ["pillow", "diffusers>=0.32", "scikit-learn", "transformers>=4.46", *PLOT]
REAL = ["gguf>=0.10", "accelerate", "transformers>=5", *PLOT]  # GGUF files: quickstart_continue.sh --real
TRITON = ["triton; platform_system == 'Linux'"]  # CUDA builds of torch bring the version that they need
COMMANDS = find_namespace_packages(include=["tools", "tools.*", "data_prep", "data_prep.*"])  # see moh_lm/cli
NAMES = ["tokenize", *sorted(path.stem for path in Path("tools").glob("[a-z]*.py"))]

setup(
    name="moh-lm",
    version="0.1.0",
    description="Pretraining of language models with Mixture-of-Head attention (arXiv 2410.11842) on DeepSpeed",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=["License :: OSI Approved :: Apache Software License"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["moh_lm", "moh_lm.*"]), *(f"moh_lm.commands.{name}" for name in COMMANDS)],
    package_dir={f"moh_lm.commands.{name}": name.replace(".", "/") for name in COMMANDS},
    package_data={
        "moh_lm.kernels": ["measured.json"],
        "moh_lm.monitor.report": ["page.html"],
        "moh_lm.commands.tools.heads": ["page.html"],
        "moh_lm.commands.data_prep.recipes": ["moh.mix"],
    },
    entry_points={
        "console_scripts": [
            "moh-pretrain = moh_lm.pretrain:main",
            *(f"moh-{name.replace('_', '-')} = moh_lm.cli.console:main" for name in NAMES),
        ]
    },
    install_requires=[
        "torch>=2.10",  # earlier ones cannot compile mm with out_dtype, see wide_linear.py
        "deepspeed~=0.19.8",  # its optimizers are read through private attributes, so not any newer series
        "sentencepiece>=0.2.2",
        "pyyaml",  # files of --config
        "psutil",
        "protobuf",  # for sentencepiece_model_pb2, which sentencepiece brings without it
        "numpy",
        "pyarrow",
        "zstandard",
        "tensorboard",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "vision": VISION,
        "fid": ["torch-fidelity>=0.4"],  # brings torchvision
        "hf": ["transformers>=4.46", *PLOT],  # what the quickstart needs: exports, and the page of a run
        "real": REAL,
        "llama3": ["tiktoken"],  # reads LLaMA-3's tokenizer.model
        "eval": EVAL,
        "chat": CHAT,
        "test": ["pytest", "pytest-xdist", "ruff", "tiktoken", *REAL, *CHAT, *EVAL, *VISION, *TRITON],
        "plot": PLOT,
        "wandb": ["wandb"],
        "gpu": TRITON,
        "remote": ["fsspec", "s3fs", "gcsfs", "huggingface_hub"],  # data directories that are elsewhere
    },
)
