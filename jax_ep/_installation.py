"""The folders of this package: which one this process imports, and where its compiled extension lies."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def folder() -> Path:
    """Returns the folder from which this process imports the package."""
    return Path(__file__).absolute().parent


def extension_in(package: Path) -> Path | None:
    """Returns the compiled extension that this Python would import from a package's folder, if any."""
    spec = PathFinder.find_spec("jax_ep._C", [str(package)])
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def hidden_copies() -> list[Path]:
    """Returns the other folders on sys.path that have the package with its compiled extension."""
    packages = [Path(entry or ".").absolute() / "jax_ep" for entry in sys.path]
    others = [package for package in packages if package.resolve() != folder().resolve()]
    return [
        package
        for package in dict.fromkeys(others)
        if (package / "__init__.py").exists() and extension_in(package) is not None
    ]


def how_to_unhide() -> str:
    """Returns what to do such that a process imports another copy of the package than this one."""
    parent = folder().parent
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(entry and Path(entry).resolve() == parent.resolve() for entry in listed):
        return f"Remove {parent} from PYTHONPATH"
    if sys.flags.safe_path:
        return f"Remove {parent} from sys.path"
    return "Start Python in another folder, or with -P (PYTHONSAFEPATH=1)"


def why_not_importable(error: ImportError) -> str:
    """Returns why the import of the compiled extension failed with an error, and what to do."""
    package = folder()
    is_source = (package.parent / "pyproject.toml").exists()
    path = extension_in(package)
    if path is not None:
        return (
            f"the extension {path} cannot be imported ({error}). Build the package again for this system: "
            "pip install --force-reinstall --no-deps ."
        )
    kind = "a source folder without the compiled extension" if is_source else "without the compiled extension"
    found = f"this process imports jax_ep from {package}, {kind}"
    if copies := hidden_copies():
        hidden = " and ".join(map(str, copies))
        return f"{found}, which hides the installed package in {hidden}. {how_to_unhide()}"
    foreign = ", ".join(sorted(path.name for path in package.glob("_C.*.so")))
    if foreign:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        found += f" for Python {python} (it has {foreign}, for another Python)"
    if not is_source:
        return f"{found}. Install the package again"
    return (
        f"{found}, and no installed package was found. Run `pip install .` in {package.parent}, and then use "
        "the package from elsewhere: start Python in another folder, or with -P (PYTHONSAFEPATH=1)"
    )
