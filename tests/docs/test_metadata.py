"""What a package index would show of the package: its metadata, as the build writes them."""

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import types
from pathlib import Path

import pytest

import jax_ep

pytestmark = pytest.mark.no_jax

ROOT = Path(__file__).parents[2]
PREPARE = "import scikit_build_core.build as b; print(b.prepare_metadata_for_build_wheel('metadata'))"
SDIST = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)]*)\)")


def metadata(folder, edit=lambda text: text):
    """The metadata of the package with an edited pyproject.toml."""
    pytest.importorskip("scikit_build_core")
    shutil.copytree(ROOT / "jax_ep", folder / "jax_ep", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in ("release", "licenses"):
        shutil.copytree(ROOT / path, folder / path)
    for path in ("README.md", "LICENSE", "CMakeLists.txt"):
        shutil.copy(ROOT / path, folder)
    (folder / "pyproject.toml").write_text(edit((ROOT / "pyproject.toml").read_text()))
    made = subprocess.run(
        [sys.executable, "-c", PREPARE],
        cwd=folder,
        env={**os.environ, "SKBUILD_CMAKE_DEFINE": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (path,) = (folder / "metadata").rglob("METADATA")
    return email.message_from_string(path.read_text())


def test_no_link_of_the_readme_is_relative(tmp_path):
    shown = metadata(tmp_path)
    text = shown.get_payload()
    assert shown["Description-Content-Type"] == "text/markdown"
    assert [link for _, link in LINK.findall(text) if not link.startswith("https://")] == []
    assert text.split("```")[1::2] == (ROOT / "README.md").read_text().split("```")[1::2]  # code as it was
    if shown["Project-URL"] is None:
        assert "[start in five minutes" not in text
        assert "start in five minutes [docs/start.md]" in text


def test_links_lead_to_the_repository(tmp_path):
    address = "https://host.example/us/jax_ep"

    def edit(text):
        assert "\nurls" not in text, "the project has an address: test with that"
        return text.replace("[project]\n", f'[project]\nurls = {{ Source = "{address}" }}\n')

    shown = metadata(tmp_path, edit)
    assert shown["Project-URL"] == f"Source, {address}"
    links = LINK.findall(shown.get_payload())
    linked = [path for _, path in LINK.findall((ROOT / "README.md").read_text())]
    assert len(links) == len(linked) > 10
    for (image, link), path in zip(links, linked, strict=True):
        assert (ROOT / path).is_file()
        assert link == f"{address}/{'raw' if image else 'blob'}/HEAD/{path}"


def test_public_files_agree_with_the_metadata():
    """The address, when there is one, stands in pyproject.toml alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = ("CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md", *sorted((ROOT / ".github").rglob("*.*")))
    text = {str(path): (ROOT / path).read_text() for path in files}
    assert f"license: {project['license']}\n" in text["CITATION.cff"]
    assert f"- name: {project['authors'][0]['name']}\n" in text["CITATION.cff"]
    addresses = set(re.findall(r"https?://([\w.-]+)|\S+@\S+\.\w+", "".join(text.values())))
    assert addresses == {"www.contributor-covenant.org"}
    workflow = text[str(ROOT / ".github" / "workflows" / "ci.yml")]
    assert "bash .ci/run\n" in workflow
    assert f'python-version: "{project["requires-python"].removeprefix(">=")}"' in workflow
    yaml = pytest.importorskip("yaml")
    release = yaml.safe_load(text[str(ROOT / ".github" / "workflows" / "release.yml")])
    steps = [step for job in release["jobs"].values() for step in job["steps"]]
    commands = [step.get("run", step.get("uses")) for step in steps]
    assert any("make release " in command for command in commands)
    assert not any("publish" in command or "twine" in command for command in commands)


def test_the_page_installs_the_frameworks_of_their_tests():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    page = (ROOT / "docs/howto/maxtext.md").read_text()
    assert [package for package in groups["frameworks"] if package not in page] == []


def test_source_archive_has_all_files(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a clone")
    pytest.importorskip("scikit_build_core")
    subprocess.run([sys.executable, "-c", SDIST, tmp_path], cwd=ROOT, check=True, timeout=120)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert set(tracked.stdout.splitlines()) - names == {".ci/run"}


def test_the_changelog_has_this_version():
    """Its newest heading, but for what is not released yet, with a date."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [heading for heading in headings if heading != "Unreleased"]
    assert headings in (versions, ["Unreleased", *versions])
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", version) for version in versions)
    assert versions[0].split(" - ")[0] == jax_ep.__version__


@pytest.mark.parametrize("address", [None, "https://host.example/us/jax_ep"])
def test_the_site_links_to_the_repository(tmp_path, monkeypatch, address):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs" / "theme")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "theme" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    urls = "" if address is None else f'urls = {{ Source = "{address}" }}\n'
    (tmp_path / "pyproject.toml").write_text(f"[project]\n{urls}")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    extra = hooks.on_config(types.SimpleNamespace(extra={})).extra
    assert [link["link"] for link in extra.get("social", [])] == ([] if address is None else [address])
