"""The report of `python -m jax_ep info`: versions, devices and the implementation that the ops use."""

import json
import platform
import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import jax

import jax_ep
from jax_ep import _extension, _installation
from jax_ep._group import domains, nccl
from jax_ep._group.group import Group

WIDTH = 110


def version(package: str) -> str:
    """Returns the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def cuda_plugins() -> dict[str, str]:
    """Returns the versions of JAX's CUDA plugins that are installed."""
    names = [f"jax-cuda{major}-{kind}" for major in (12, 13) for kind in ("plugin", "pjrt")]
    return {name: version(name) for name in names if version(name) != "not installed"}


def cuda_majors(plugins: Iterable[str]) -> list[int]:
    """Returns the CUDA versions that plugins are for: 12, 13 or both."""
    return sorted({int(name.removeprefix("jax-cuda").split("-")[0]) for name in plugins})


def cuda_problems(built: int | None, plugins: Iterable[str], driver: int, on_gpu: bool = False) -> list[str]:
    """Returns why the extension, JAX's CUDA plugins and the NVIDIA driver do not fit each other.

    `on_gpu`: JAX uses GPUs, perhaps by a plugin that pip did not install.
    """
    majors = cuda_majors(plugins)
    if not majors:
        newest = "cuda13" if driver >= 13000 else "cuda12"
        is_missing = driver and not on_gpu
        return [f"JAX has no CUDA plugin: pip install 'jax[{newest}]'"] if is_missing else []
    problems = []
    if len(majors) > 1:
        problems.append("JAX needs one CUDA plugin, and has two: uninstall the packages of one of them")
    if not driver:
        return [*problems, "there is no NVIDIA driver"]
    if max(majors) > driver // 1000:
        supported, newest = _extension.cuda_text(driver), max(majors)
        problems.append(
            f"JAX's plugin needs a driver for CUDA {newest}; this one supports {supported}. Install a newer "
            f"driver, or: pip uninstall jax-cuda{newest}-plugin jax-cuda{newest}-pjrt, then "
            "pip install 'jax[cuda12]'"
        )
    if built is not None and (reason := _extension.reason_against_driver(built)):
        problems.append(reason)
    return problems


def cuda_report(built: int | None, on_gpu: bool) -> dict[str, Any] | None:
    """Returns JAX's CUDA plugins, the driver's CUDA version, and what does not fit.

    None if neither the extension nor JAX has a CUDA part.
    """
    plugins = cuda_plugins()
    if built is None and not plugins:
        return None
    driver = _extension.driver_cuda_version()
    return {
        "plugins": plugins,
        "driver": _extension.cuda_text(driver) if driver else None,
        "problems": cuda_problems(built, plugins, driver, on_gpu),
    }


# Architectures on which this project has executed the kernels for grouped products.
_EXECUTED = ("90",)


def _product_engines(architectures: str) -> list[dict[str, Any]]:
    """Returns the engine for grouped products on each architecture that the extension was built for."""
    return [
        {"architecture": f"sm_{a}", "engine": _extension.product_engine(a), "executed": a in _EXECUTED}
        for a in re.findall(r"\d+", architectures)
    ]


def mesh_of(devices: Sequence[Any]) -> jax.sharding.Mesh:
    """Returns a mesh of the devices, with one axis "ep"."""
    kind = jax.sharding.AxisType.Auto
    return jax.make_mesh((len(devices),), ("ep",), axis_types=(kind,), devices=devices)


def labeled(label: str, text: str) -> list[str]:
    """Returns lines of a report: the label, and next to it the text."""
    indent = " " * 12
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{label:12s}",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [label]


def collect() -> dict[str, Any]:
    """Returns the report, as values that JSON can hold."""
    devices = jax.local_devices()
    module = _extension.extension()
    on_gpu = devices[0].platform == "gpu"
    report: dict[str, Any] = {
        "versions": {
            "jax_ep": jax_ep.__version__,
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "python": platform.python_version(),
            "platform": devices[0].client.platform_version.splitlines()[0],
            "xla_ffi": ".".join(map(str, _extension.runtime_ffi_version())),
        },
        "folder": str(_installation.folder()),
        "build": None if module is None else dict(module.build_info()),
        "processes": jax.process_count(),
        "devices": [
            {"id": d.id, "process": d.process_index, "platform": d.platform, "kind": d.device_kind}
            for d in devices
        ],
    }
    if cuda := cuda_report((report["build"] or {}).get("cuda"), on_gpu):
        report["cuda"] = cuda
    if report["build"] is not None and "cuda_architectures" in report["build"]:
        report["product_engines"] = _product_engines(report["build"]["cuda_architectures"])
    if on_gpu and not _extension.reason_against_ffi("gpu") and module is not None:
        samples = _extension.sample_addresses(devices)
        description = module.describe_gpus([d.local_hardware_id for d in devices], samples)
        for device, gpu in zip(report["devices"], description["gpus"], strict=True):
            device.update(gpu)
        report["links"] = description["links"]
    with warnings.catch_warnings(action="ignore"), Group(mesh_of(devices), "ep") as group:
        info = group.info()  # has the reason of a fallback, about which the group warns
    report["implementation"] = info.implementation
    report["why_not_ffi"] = "" if info.implementation == "ffi" else info.reason
    report["ranks_per_domain"] = info.ranks_per_domain
    report["fabric"] = domains.describe_sharing(devices[0]) if on_gpu else None
    report["rails"] = nccl.describe() if on_gpu else None
    report["device_bytes_of_a_group"] = info.device_bytes
    return report


def _cuda_lines(cuda: dict[str, Any]) -> list[str]:
    plugins = ", ".join(f"{name} {text}" for name, text in cuda["plugins"].items())
    supports = f"supports CUDA {cuda['driver']}" if cuda["driver"] else "none"
    lines = labeled("CUDA", f"JAX's plugin: {plugins or 'none'}; driver: {supports}")
    for problem in cuda["problems"]:
        lines += labeled("", f"NOTE: {problem}")
    return lines


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{name:12s}{version}" for name, version in report["versions"].items()]
    lines.insert(1, f"{'':12s}from {report['folder']}")
    build = report["build"]
    if build is None:
        lines.append("extension   none")
    else:
        ffi = ".".join(map(str, build["ffi_api_version"]))
        lines.append(f"extension   for XLA FFI {ffi}, compiler {build['compiler']}")
        if "cuda" in build:
            cuda = _extension.cuda_text(build["cuda"])
            lines.append(f"{'':12s}CUDA {cuda}, architectures {build['cuda_architectures']}")
            if "cutlass" in build:
                lines.append(f"{'':12s}CUTLASS {build['cutlass']}")
            for product in report.get("product_engines", ()):
                state = "executed" if product["executed"] else "compiled, never executed"
                lines.append(f"{'':12s}{product['architecture']}: engine {product['engine']}, {state}")
        else:
            lines.append(f"{'':12s}without CUDA")
    if "cuda" in report:
        lines += _cuda_lines(report["cuda"])
    for device in report["devices"]:
        text = f"{device['platform']} {device['id']}: {device['kind']}"
        if "memory" in device:
            text += (
                f", sm_{device['compute_capability']}, {device['sms']} SMs, memory from {device['memory']}"
            )
        lines.append(f"{'device':12s}{text}")
    for i, row in enumerate(report.get("links", [])):
        lines.append(f"{'links' if i == 0 else '':12s}" + " ".join(f"{link:6s}" for link in row))
    lines.append(f"ops run as  implementation={report['implementation']!r}")
    if report["why_not_ffi"]:
        lines += labeled("", f"not 'ffi': {report['why_not_ffi']}")
    lines.append(f"domains     each has {report['ranks_per_domain']} of {len(report['devices'])} ranks")
    if report["fabric"] is not None:
        lines += labeled("", f"may span hosts that NVLink joins: {report['fabric']}")
    if report["rails"] is not None:
        lines.append(f"{'':12s}between domains: {report['rails']}")
    group_bytes = report["device_bytes_of_a_group"]
    lines.append(
        f"a group     occupies {group_bytes} bytes of JAX's memory on each device, and no other memory"
    )
    return lines


def run(as_json: bool) -> int:
    """Prints the report, as JSON or as text, and returns the exit status."""
    report = collect()
    print(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))
    return 0
