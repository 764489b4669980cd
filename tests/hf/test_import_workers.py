"""The command line of an import: in several processes, killed, out of space, and planned for 70B parameters."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hf_models import make_llama, save_tokenizer

from megatron_aha.errors import UserError
from megatron_aha.hf.cli import convert_from_hf
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint

TOOL = Path(__file__).parents[2] / "tools" / "convert_from_hf.py"
SHARD_BYTES = 50_000
PARAMETERS_70B = 70_553_706_496


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "hf"
    make_llama(num_hidden_layers=8, vocab_size=1201).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    """What one worker writes."""
    output = source.parent / "whole"
    import_checkpoint(source, output, shard_bytes=SHARD_BYTES, check=False, say=lambda line: None)
    return contents(output)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def start(
    source: Path, output: Path, workers: int, before: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    command = f"{sys.executable} {TOOL} --skip-logits-check --max-shard-gb {SHARD_BYTES / 1e9:f}".split()
    command += ["--source", str(source), "--output", str(output), "--workers", str(workers)]
    root = TOOL.parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=before, env=environment
    )


def test_two_and_three_workers_write_the_bytes_of_one(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    assert len(whole) > 30
    for workers in (2, 3):
        output = tmp_path / str(workers)
        import_checkpoint(
            source, output, shard_bytes=SHARD_BYTES, workers=workers, check=False, say=lambda line: None
        )
        assert contents(output) == whole, workers


def test_two_workers_export_the_bytes_of_one(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    for workers in (1, 2):
        export_checkpoint(
            source.parent / "whole",
            tmp_path / str(workers),
            shard_bytes=SHARD_BYTES,
            workers=workers,
            check=False,
            say=lambda line: None,
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_the_command_killed_with_its_workers_goes_on(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "ours"
    process = start(source, output, 2)
    while len(list(output.glob(".import/*.record.json"))) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    assert not (output / "step_00000000").exists()
    while any(Path(f"/proc/{worker}/exe").exists() for worker in workers):
        time.sleep(0.01)  # they end with their parent, or this test does not
    folder = output / ".tmp-step_00000000"
    notes = [path.name.removesuffix(".record.json") for path in output.glob(".import/[!.]*.record.json")]
    finished = {name: (folder / name).stat().st_ino for name in notes}
    again = start(source, output, 3)
    said, errors = again.communicate()
    assert again.returncode == 0, errors
    assert f"going on: {len(finished)} of " in said
    assert contents(output) == whole
    assert {name: (output / "step_00000000" / name).stat().st_ino for name in finished} == finished


def test_a_worker_without_space_is_told_in_one_sentence(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "ours"

    def small_files() -> None:
        # the embedding and the output layer, 307 kB each, do not fit
        resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))

    process = start(source, output, 2, small_files)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert errors.startswith("error: no space left on disk while writing") and errors.count("\n") == 1, errors
    again = start(source, output, 1)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert contents(output) == whole


def make_sparse_70b(folder: Path) -> None:
    """Writes Llama-3.1-70B's configuration, index and files whose tensors are holes."""
    hidden, ffn, layers, vocab = 8192, 28672, 80, 128256
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [vocab, hidden]}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": [hidden, hidden],
            f"{prefix}self_attn.k_proj.weight": [1024, hidden],
            f"{prefix}self_attn.v_proj.weight": [1024, hidden],
            f"{prefix}self_attn.o_proj.weight": [hidden, hidden],
            f"{prefix}mlp.gate_proj.weight": [ffn, hidden],
            f"{prefix}mlp.up_proj.weight": [ffn, hidden],
            f"{prefix}mlp.down_proj.weight": [hidden, ffn],
            f"{prefix}input_layernorm.weight": [hidden],
            f"{prefix}post_attention_layernorm.weight": [hidden],
        }
    shapes |= {"model.norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}
    assert sum(math.prod(shape) for shape in shapes.values()) == PARAMETERS_70B
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map = list(shapes), {}
    for number in range(30):
        file = f"model-{number + 1:05d}-of-00030.safetensors"
        header, end = {}, 0
        for name in names[number * 25 : number * 25 + 25]:
            begin, end = end, end + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_import_of_70b_parameters_is_planned_from_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_sparse_70b(tmp_path / "hf")
    on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "hf").iterdir())
    assert on_disk < 2_000_000
    arguments = ["--source", str(tmp_path / "hf"), "--output", str(tmp_path / "ours"), "--dry-run"]
    convert_from_hf([*arguments, "--workers", "4"])
    said = capsys.readouterr().out
    # gate and up of a layer, 2 * 2 * 28672 * 8192 bytes, and the one weight that they become; the embedding has 2.10 GB
    assert f"141.11 GB of weights ({PARAMETERS_70B} parameters), the largest 2.10 GB" in said
    assert "at most 2.10 GB in each of 4 processes" in said
    assert "fp32, 282.21 GB; --skip-logits-check leaves it out" in said
    free = shutil.disk_usage(tmp_path).free
    assert ("GB too little" in said) == (free < 2 * PARAMETERS_70B)
    files = int(said.split("would write ")[1].split(" files")[0])
    assert 141.11e9 / 2**30 < files < 2 * 141.11e9 / 2**30
    convert_from_hf([*arguments, "--dtype", "float32", "--max-shard-gb", "10"])
    said = capsys.readouterr().out
    assert "282.21 GB of weights" in said
    assert "at most 6.30 GB in each of 1 processes" in said  # the embedding, and its copy of twice the size
    assert not (tmp_path / "ours").exists()


def test_options_that_cannot_be_are_refused(source: Path, tmp_path: Path) -> None:
    both = ["--source", str(source), "--output", str(tmp_path / "ours")]
    with pytest.raises(UserError, match="--workers 0 must be at least 1"):
        convert_from_hf([*both, "--workers", "0"])
    for size in ("0", "inf", "nan"):
        with pytest.raises(UserError, match=f"--max-shard-gb {float(size)} must be a number above 0"):
            convert_from_hf([*both, "--max-shard-gb", size])
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(UserError, match="--workers 2: one process reads a .gguf file as a whole"):
        import_checkpoint(tmp_path / "model.gguf", tmp_path / "ours", workers=2)
