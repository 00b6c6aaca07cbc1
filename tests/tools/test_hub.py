"""The client of the hub (tools/hf/convert/hub.py) against a stand-in: its requests, and its words on a refusal."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from moh_lm.config import ConfigError
from tools.hf.convert import hub
from tools.import_hf import model_path


class Api:
    """The methods of huggingface_hub.HfApi that are called; ``refuses``: the one that fails."""

    calls, refuses = [], ""

    def __getattr__(self, name):
        def answer(*arguments, **named):
            self.calls.append((name, arguments, named))
            if name == self.refuses:
                raise RuntimeError("401: no\nentry")
            return {"snapshot_download": "/cache/model", "create_repo": "https://hub/me/moh"}.get(name)

        return answer


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(Api, "calls", [])
    monkeypatch.setattr(hub, "HfApi", Api)
    return Api


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "tokenizer.model", "moh_gates.py", "chat_template.jinja",
             "special_tokens_map.json", "added_tokens.json", "adapter_config.json", "adapter_model.safetensors"],
)  # fmt: skip
def test_files_of_an_earlier_model_do_not_stay_beside_an_export(name):
    assert any(fnmatch(name, pattern) for pattern in hub.OF_EXPORTS)


def test_a_name_is_downloaded_and_a_directory_is_not(api, tmp_path):
    assert hub.model_directory(tmp_path) == tmp_path and not api.calls
    assert hub.model_directory(Path("org/some-model")) == Path("/cache/model")
    patterns = {"allow_patterns": hub.FILES, "ignore_patterns": hub.COPIES}
    assert api.calls == [("snapshot_download", ("org/some-model",), patterns)]
    assert hub.model_directory(Path("hf://org/some-model")) == Path("/cache/model") and len(api.calls) == 2
    assert not any("*.bin" in pattern or "*.py" in pattern for pattern in hub.FILES)  # nothing that can run


@pytest.mark.parametrize("name", [
    "exports/llm-b", "./exports/llm-b", "exports/runs/llm-b", "~/llm-b", "./absent/llm-b", "absent/llm-b/",
])  # fmt: skip
def test_an_absent_path_is_not_looked_for_on_the_hub(name, api, tmp_path, monkeypatch):
    (tmp_path / "exports").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no such directory"):
        hub.model_directory(model_path(name))
    assert not api.calls
    assert hub.model_directory(Path("hf://exports/llm-b")) == Path("/cache/model")


@pytest.mark.parametrize("name", ["llm.gguf", "exports/llm.gguf", "absent/llm.gguf", "~/llm.gguf"])
def test_an_absent_gguf_file_is_called_a_file(name, api, tmp_path, monkeypatch):
    (tmp_path / "exports").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--model {name}: there is no such file; give the path"):
        hub.model_directory(model_path(name))
    assert not api.calls


@pytest.mark.parametrize("name", ["hf://", "hf://org", "hf://org/", "hf://a/b/c", "hf://org/a b", "hf:org"])
def test_only_owner_and_name_are_a_model_of_the_hub(name, api):
    with pytest.raises(ConfigError, match=r"--model hf://.*: does not name a model .*; write hf://OWNER/NAME"):
        hub.model_directory(model_path(name))
    assert not api.calls and hub.model_directory(model_path("hf://org/name/")) == Path("/cache/model")


def test_an_export_is_pushed_to_a_repository_that_may_be_there(api, tmp_path):
    hub.check_login("me/moh")
    assert hub.push(tmp_path, "me/moh") == "https://hub/me/moh"
    assert api.calls == [
        ("whoami", (), {}),
        ("create_repo", ("me/moh",), {"exist_ok": True}),
        ("upload_folder", (), {"repo_id": "me/moh", "folder_path": str(tmp_path), "delete_patterns": hub.OF_EXPORTS}),
    ]


@pytest.mark.parametrize("refuses, call, error, words", [
    ("snapshot_download", lambda: hub.model_directory(Path("org/model")), ConfigError, "hf download org/model"),
    ("whoami", lambda: hub.check_login("me/moh"), ConfigError, "hf auth login"),
    ("", lambda: hub.check_login("moh"), ConfigError, "--push-to-hub moh: write OWNER/NAME"),
    ("upload_folder", lambda: hub.push("out", "me/moh"), hub.UploadError, "out is complete, but not on the hub"),
])  # fmt: skip
def test_what_the_hub_refuses_is_one_line_with_the_remedy(api, monkeypatch, refuses, call, error, words):
    monkeypatch.setattr(Api, "refuses", refuses)
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value) and "\n" not in str(raised.value)
