"""The text of the atlas: what is read of packages, and what is left out."""

import zipfile
from pathlib import Path

from studies import atlas_corpus


def test_no_text_of_a_module_is_in_two_kinds(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""What it is."""\n# A comment that reads as a sentence, and goes on for long enough to be kept\n'
        "# on two lines.\n"
        'def f():\n    """What it does."""\n    # x = 1\n    return """\n# no comment\n"""  # beside\n'
    )
    parts = atlas_corpus.module_parts(path)
    assert parts == {
        "docstrings": "What it is.\n\nWhat it does.",
        "prose": "A comment that reads as a sentence, and goes on for long enough to be kept\non two lines.",
        "code": 'def f():\n    return """\n# no comment\n"""  # beside\n',
    }


def test_wheels_are_read_as_one_folder(tmp_path):
    modules = {"a/one.py": "x = 1\n" * 99, "b/two.py": "y = 2\n" * 99, "b/tests/three.py": "z = 3\n" * 99}
    (tmp_path / "wheels").mkdir()
    for name, text in modules.items():
        with zipfile.ZipFile(tmp_path / "wheels" / f"{Path(name).stem}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(name, text)
    atlas_corpus.unpack(tmp_path / "wheels", tmp_path / "packages")
    documents, unread = atlas_corpus.read_packages(tmp_path / "packages")
    assert documents == {"docstrings": [], "prose": [], "code": ["x = 1\n" * 99, "y = 2\n" * 99]} and unread == 0


def test_packages_that_pip_does_not_find_end_the_command(tmp_path, monkeypatch, capsys):
    packages = tmp_path / "packages.txt"
    packages.write_text(f"no-such-package==1.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(atlas_corpus, "PACKAGES", packages)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert atlas_corpus.main([str(tmp_path / "corpus")]) == 1
    message = capsys.readouterr().err
    assert f"pip could not download the packages of {packages}" in message and "no-such-package" in message
    assert "--data-dir" in message and not list((tmp_path / "corpus").iterdir())


def test_copies_and_text_that_is_no_english_are_left_out(tmp_path):
    story = "".join(f"This is sentence number {number} of a page.\n" for number in range(20))
    other = "".join(f"Here the sentences are others, {number} in all.\n" for number in range(20))
    pages = {
        "a/README.md": story,
        "b/LICENSE": story + "One line more than the page before has.\n",
        "c/notes.rst": other,
        "c/table.txt": "1.25 0.50 8.75\n" * 100,
        "c/greek.md": "Ἄνδρα μοι ἔννεπε, Μοῦσα, πολύτροπον\n" * 20,
        "c/tests/page.md": "Pages of tests are not read, whatever they say.\n" * 20,
        "c/broken.py": "def f(:\n",
    }
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    documents, unread = atlas_corpus.read_packages(tmp_path)
    own = [text for text in documents["prose"] if text in pages.values()]
    assert own == [story, pages["b/LICENSE"], other] and unread == 1
    assert sorted(atlas_corpus.without_copies([*own, "brief", "brief"])) == sorted([story, other, "brief"])


def test_a_foreign_file_is_refused_before_anything_is_downloaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "code.jsonl.zst").write_bytes(b"mine")
    monkeypatch.setattr(atlas_corpus, "download", None)
    assert atlas_corpus.main([str(tmp_path)]) == 2
    assert "code.jsonl.zst: was written or changed by someone else" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["code.jsonl.zst"]
