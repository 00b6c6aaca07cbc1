from setuptools import find_packages, setup

EVAL = ["lm_eval~=0.4.13", "accelerate", "transformers>=4.46"]
PLOT = ["matplotlib", "jinja2"]
TRITON = ["triton; platform_system == 'Linux'"]  # CUDA builds of torch bring the version that they need

setup(
    name="moh-lm",
    version="0.1.0",
    description="Pretraining of language models with Mixture-of-Head attention (arXiv 2410.11842) on DeepSpeed",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=["License :: OSI Approved :: Apache Software License"],
    python_requires=">=3.10",
    packages=find_packages(include=["moh_lm", "moh_lm.*"]),
    package_data={"moh_lm.kernels": ["measured.json"], "moh_lm.monitor.report": ["page.html"]},
    install_requires=[
        "torch>=2.8",
        "deepspeed~=0.19.8",  # its optimizers are read through private attributes, so not any newer series
        "sentencepiece",
        "protobuf",  # for sentencepiece_model_pb2, which sentencepiece brings without it
        "numpy",
        "pyarrow",
        "zstandard",
        "tensorboard",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "hf": ["transformers>=4.46", *PLOT],  # what the quickstart needs: exports, and the page of a run
        "llama3": ["tiktoken"],  # reads LLaMA-3's tokenizer.model
        "eval": EVAL,
        "test": ["pytest", "pytest-xdist", "ruff", "tiktoken", "transformers>=4.46", *EVAL, *PLOT, *TRITON],
        "plot": PLOT,
        "wandb": ["wandb"],
        "gpu": TRITON,
    },
)
