"""The Hugging Face hub: importing a model by its name, and publishing an export."""

import re
import shlex
import textwrap
from pathlib import Path

from moh_lm.config import ConfigError
from moh_lm.data.shards import TOKENIZER_FILES
from tools.hf.convert.export_files import INDEX, SINGLE
from tools.hf.convert.gguf_source import SUFFIX
from tools.hf.convert.shipped_code import LANGUAGE

try:
    from huggingface_hub import HfApi
except ImportError:  # it comes with transformers
    HfApi = None

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
DIGITS = "[0-9]" * 5
OF_EXPORTS = [  # the hub's patterns, whose * spans folders, for files that not every export replaces, but that load
    SINGLE, INDEX, f"model-{DIGITS}-of-{DIGITS}.safetensors", *TOKENIZER_FILES, "added_tokens.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja", *LANGUAGE,
]  # fmt: skip
ADAPTER = "adapter_config.json"  # transformers would load its model instead of the export beside it
COPIES = ["consolidated*"]  # Mistral's second copy of all weights
FILES = [  # files of a model that is imported
    "*.json", "*.safetensors", "*.jinja", "tokenizer.model", "original/tokenizer.model",
]  # fmt: skip


class UploadError(Exception):
    """The export is in its directory, but not on the hub."""


def model_directory(model: str) -> Path:
    """Return the directory ``model`` or, for OWNER/NAME on the hub, the directory of the downloaded files. Raises
    ConfigError.

    OWNER/NAME means the hub if OWNER is not a local directory; hf://OWNER/NAME always does. No other spelling does, so
    that /OWNER/NAME on a disk that is not mounted is an error.
    """
    path, meant = Path(model), model.startswith("hf:")
    name = model.removeprefix("hf:").strip("/") if meant else model
    if path.exists():
        return path
    if meant and not NAME.fullmatch(name):
        raise ConfigError([f"--model {model}: does not name a model on the hub; write hf://OWNER/NAME"])
    if path.suffix == SUFFIX and not meant:
        raise ConfigError([f"--model {model}: there is no such file; give the path of a GGUF file"])
    given, by_hand = f"--model {model}: there is no such directory", f"hf download {name} --local-dir DIR"
    if not NAME.fullmatch(name):
        raise ConfigError([f"{given}; give a model in Hugging Face form, or its OWNER/NAME on the hub"])
    if path.parent.exists() and not meant:
        raise ConfigError([f"{given}, but there is a directory {path.parent}; hf://{name} is the model of the hub"])
    if HfApi is None:
        raise ConfigError([f"{given}; to download it from the hub: pip install huggingface_hub, and {by_hand}"])
    print(f"downloading {name} from the Hugging Face hub", flush=True)
    try:
        return Path(HfApi().snapshot_download(name, allow_patterns=FILES, ignore_patterns=COPIES))
    except Exception as error:  # from the client of the hub, or its HTTP library
        raise ConfigError([f"{given}, and the hub does not provide it ({words(error)}); try {by_hand}"]) from error


def check_login(name):
    """Raise ConfigError if nothing can be published as ``name``."""
    given = f"--push-to-hub {name}"
    if not NAME.fullmatch(name):
        raise ConfigError([f"{given}: write OWNER/NAME"])
    if HfApi is None:
        raise ConfigError([f"{given}: the package huggingface_hub is not installed: pip install huggingface_hub"])
    try:
        HfApi().whoami()
        has_adapter = HfApi().file_exists(name, ADAPTER)
    except Exception as error:  # from the client of the hub, or its HTTP library
        raise ConfigError([f"{given}: you are not logged in to the hub ({words(error)}); try hf auth login"]) from error
    if has_adapter:
        instead = "which transformers would load instead of the export"
        raise ConfigError([f"{given}: has {ADAPTER}, {instead}; delete that file there, or give another name"])


def push(directory, name):
    """Publish the files of ``directory`` in the repository ``name``, which is created if needed; returns its address.

    Files of an earlier export are removed: if its shards differed, its weights would be loaded instead of these. Other
    files stay.
    """
    try:
        address = HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=str(directory), delete_patterns=OF_EXPORTS)
    except Exception as error:  # from the client of the hub, or its HTTP library
        code = f"from tools.hf.convert import hub; hub.check_login({name!r}); hub.push({str(directory)!r}, {name!r})"
        again = shlex.join(["python", "-c", code])
        raise UploadError(f"{directory} is complete, but not on the hub ({words(error)}); try {again}") from error
    return address


def words(error):
    return textwrap.shorten(f"{type(error).__name__}: {error}", 120, placeholder=" ...")
