"""The client of the hub (tools/hf/convert/hub.py) against a stand-in: its requests, and its words on a refusal."""

import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from moh_lm.config import ConfigError
from tools.hf.convert import hub


class Api:
    """The methods of huggingface_hub.HfApi that are called; ``refuses``: the one that fails; ``there``: (repository,
    file) that exists.
    """

    calls, refuses, there = [], "", ()

    def __getattr__(self, name):
        def answer(*arguments, **named):
            self.calls.append((name, arguments, named))
            if name == self.refuses:
                raise RuntimeError("401: no\nentry")
            found = {"snapshot_download": "/cache/model", "create_repo": "https://hub/me/moh"}
            return arguments == self.there if name == "file_exists" else found.get(name)

        return answer


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(Api, "calls", [])
    monkeypatch.setattr(hub, "HfApi", Api)
    return Api


def test_files_of_an_earlier_export_and_no_others_are_removed_from_a_repository(api, tmp_path):
    hub.push(tmp_path, "me/moh")
    patterns = api.calls[-1][2]["delete_patterns"]
    code = {path.name for path in Path(hub.__file__).parents[1].glob("remote_code/*_moh.py")}
    old = code | {
        "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model",
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "moh_gates.py",
        "chat_template.jinja", "additional_chat_templates/rag.jinja",
    }  # fmt: skip
    foreign = [
        "train.py", "scripts/prepare.py", "adapter_model.safetensors", "other/model-00001-of-00002.safetensors",
        "other/tokenizer.json", "ema/model.safetensors", "moh_notes.py", "model-old.safetensors", "tokenizer_notes.md",
        "scripts/moh_gates.py", "templates/chat_template.jinja", "README.md", "onnx/model.safetensors.index.json",
    ]  # fmt: skip
    there = [*old, *foreign]
    assert {name for name in there if any(fnmatchcase(name, pattern) for pattern in patterns)} == old


def test_a_name_is_downloaded_and_a_directory_is_not(api, tmp_path):
    assert hub.model_directory(str(tmp_path)) == tmp_path and not api.calls
    assert hub.model_directory("org/some-model") == Path("/cache/model")
    patterns = {"allow_patterns": hub.FILES, "ignore_patterns": hub.COPIES}
    assert api.calls == [("snapshot_download", ("org/some-model",), patterns)]
    assert hub.model_directory("hf://org/some-model") == Path("/cache/model") and len(api.calls) == 2
    assert not any("*.bin" in pattern or "*.py" in pattern for pattern in hub.FILES)  # nothing that can run


@pytest.mark.parametrize("name", [
    "exports/llm-b", "./exports/llm-b", "exports/runs/llm-b", "~/llm-b", "./absent/llm-b", "absent/llm-b/",
    "../absent/llm-b", "/absent/llm-b", "/absent/llm-b/", "//absent/llm-b", "absent//llm-b", "absent/../llm-b",
])  # fmt: skip
def test_an_absent_path_is_not_looked_for_on_the_hub(name, api, tmp_path, monkeypatch):
    (tmp_path / "exports").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--model {name}: there is no such directory"):
        hub.model_directory(name)
    assert not api.calls
    assert hub.model_directory("hf://exports/llm-b") == Path("/cache/model")


@pytest.mark.parametrize("name", ["llm.gguf", "exports/llm.gguf", "absent/llm.gguf", "~/llm.gguf"])
def test_an_absent_gguf_file_is_called_a_file(name, api, tmp_path, monkeypatch):
    (tmp_path / "exports").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--model {name}: there is no such file; give the path"):
        hub.model_directory(name)
    assert not api.calls


@pytest.mark.parametrize("name", ["hf://", "hf://org", "hf://org/", "hf://a/b/c", "hf://org/a b", "hf:org"])
def test_only_owner_and_name_are_a_model_of_the_hub(name, api):
    with pytest.raises(ConfigError, match=f"--model {name}: does not name a model .*; write hf://OWNER/NAME"):
        hub.model_directory(name)
    assert not api.calls and hub.model_directory("hf://org/name/") == Path("/cache/model")


def test_an_export_is_pushed_to_a_repository_that_may_be_there(api, tmp_path):
    hub.check_login("me/moh")
    assert hub.push(tmp_path, "me/moh") == "https://hub/me/moh"
    assert api.calls == [
        ("whoami", (), {}),
        ("file_exists", ("me/moh", "adapter_config.json"), {}),
        ("create_repo", ("me/moh",), {"exist_ok": True}),
        ("upload_folder", (), {"repo_id": "me/moh", "folder_path": str(tmp_path), "delete_patterns": hub.OF_EXPORTS}),
    ]


@pytest.mark.parametrize("refuses, call, error, words", [
    ("snapshot_download", lambda: hub.model_directory("org/model"), ConfigError, "hf download org/model"),
    ("whoami", lambda: hub.check_login("me/moh"), ConfigError, "hf auth login"),
    ("", lambda: hub.check_login("moh"), ConfigError, "--push-to-hub moh: write OWNER/NAME"),
    ("upload_folder", lambda: hub.push("out", "me/moh"), hub.UploadError, "out is complete, but not on the hub"),
])  # fmt: skip
def test_what_the_hub_refuses_is_one_line_with_the_remedy(api, monkeypatch, refuses, call, error, words):
    monkeypatch.setattr(Api, "refuses", refuses)
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_repository_that_would_load_an_adapter_is_refused(api, monkeypatch):
    monkeypatch.setattr(Api, "there", ("me/moh", "adapter_config.json"))
    with pytest.raises(ConfigError, match=r"--push-to-hub me/moh: has adapter_config\.json, which .* delete that file"):
        hub.check_login("me/moh")
    assert "create_repo" not in [name for name, *_ in api.calls]


def test_the_command_after_a_failure_does_what_failed(api, monkeypatch, tmp_path):
    """For a directory whose name a shell would split."""
    monkeypatch.setattr(Api, "refuses", "upload_folder")
    with pytest.raises(hub.UploadError) as raised:
        hub.push(tmp_path / "it's an export", "me/moh")
    failed, (program, option, code) = api.calls[-1], shlex.split(str(raised.value).partition("; try ")[2])
    monkeypatch.setattr(Api, "refuses", "")
    api.calls.clear()
    exec(code)
    assert (program, option) == ("python", "-c") and api.calls[-1] == failed
    assert [name for name, *_ in api.calls] == ["whoami", "file_exists", "create_repo", "upload_folder"]
