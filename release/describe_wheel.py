"""What a wheel is: its size, what it holds, and what its extension was built with."""

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
    path = files.extract(extensions[0], folder)
    code = (
        "import importlib.util as u; s = u.spec_from_file_location('_C', __import__('sys').argv[1]);"
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.build_info())"
    )
    built = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    ).stdout
print(f"{wheel}: {size:.1f} MB (the extension {unpacked:.1f} MB), built with {built.strip()}")
if size > MOST_MB:
    sys.exit(f"{wheel} is larger than {MOST_MB} MB")
