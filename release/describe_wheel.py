"""Description of a wheel: its size, what its extension was built with, and the third-party code in it.

Each component of the bill of materials must have a license in the wheel, and the version that the extension
reports.
"""

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MOST_MB = 100  # what PyPI takes of one file, unless asked for more

wheel = Path(sys.argv[1])
size = wheel.stat().st_size / 1e6
with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory() as folder:
    extensions = [name for name in files.namelist() if ".so" in Path(name).suffixes]
    assert len(extensions) == 1, f"a wheel holds one library, the extension; this one holds {extensions}"
    unpacked = files.getinfo(extensions[0]).file_size / 1e6
    paths = set(files.namelist())
    info = next(path for path in paths if path.endswith(".dist-info/METADATA")).removesuffix("METADATA")
    components = json.loads(files.read(f"{info}sboms/jax_ep.cdx.json"))["components"]
    path = files.extract(extensions[0], folder)
    code = (
        "import importlib.util as u; s = u.spec_from_file_location('_C', __import__('sys').argv[1]);"
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.build_info())"
    )
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
built = ast.literal_eval(run.stdout)
versions = {component["name"]: component["version"] for component in components}
print(f"{wheel}: {size:.1f} MB (the extension {unpacked:.1f} MB), built with {built}")
print(f"Third-party code: {', '.join(f'{name} {version}' for name, version in versions.items())}")
for name, version in versions.items():
    assert version, f"the bill of materials has no version of {name}"
    assert f"{info}licenses/licenses/{name}.txt" in paths, f"the wheel has no license of {name}"
cuda = f"{built['cuda'] // 1000}.{built['cuda'] % 1000 // 10}" if "cuda" in built else None
reported = {"CUDA": cuda, "NCCL": built.get("nccl"), "CUTLASS": built.get("cutlass")}
assert {name: versions.get(name) for name in reported} == reported, f"the bill of materials has {versions}"
if size > MOST_MB:
    sys.exit(f"{wheel} is larger than {MOST_MB} MB")
