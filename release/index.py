"""Package index (PEP 503) in a folder, with a wheel and an older version of it, which has one more module:

python release/index.py WHEEL FOLDER
"""

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

OLDER = "0.0.1"

wheel, folder = Path(sys.argv[1]), Path(sys.argv[2]) / "jax-ep"
folder.mkdir(parents=True, exist_ok=True)
shutil.copy(wheel, folder)
name, version, tags = wheel.name.split("-", 2)
info, older_info = f"{name}-{version}.dist-info/", f"{name}-{OLDER}.dist-info/"
older = zipfile.ZipFile(folder / f"{name}-{OLDER}-{tags}", "w")
with zipfile.ZipFile(wheel) as files, older:
    for path in files.namelist():
        data = files.read(path)
        if path == f"{info}METADATA":
            data = data.replace(f"\nVersion: {version}\n".encode(), f"\nVersion: {OLDER}\n".encode())
        elif path == f"{info}RECORD":
            data = data.replace(info.encode(), older_info.encode()) + b"jax_ep/older.py,,\n"
        older.writestr(path.replace(info, older_info), data)
    older.writestr("jax_ep/older.py", "")
links = [
    f'<a href="{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>\n'
    for path in sorted(folder.glob("*.whl"))
]
(folder / "index.html").write_text("<!DOCTYPE html>\n" + "".join(links))
