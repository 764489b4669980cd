"""tools/generate.py: the text of transformers' own generate, and the usage that the routes of that text have."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_models import WINDOW, make_aha, make_llama, random_tokens, save_tokenizer, set_routes

from megatron_aha.errors import UserError
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.generate import main, usage_table
from megatron_aha.hf.importer import import_checkpoint
from megatron_aha.hf.usage import UsageCounter

PROMPT = " ".join(f"w{number}" for number in range(30, 42))
NEW = 10


def silent(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with routers, beside ``ours``, the checkpoint it was exported from."""
    work = tmp_path_factory.mktemp("generate")
    make_aha(eos_token_id=None).save_pretrained(work / "hf")
    save_tokenizer(work / "hf")
    step = import_checkpoint(work / "hf", work / "ours", check=False, say=silent)
    shutil.rmtree(work / "hf")
    return export_checkpoint(step, work / "exported", check=False, say=silent)


def told(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, str]:
    """Returns what was written to standard output and to standard error."""
    given = () if "--prompt" in options else ("--prompt", PROMPT)
    main(["--model", str(folder), "--max-new-tokens", str(NEW), "--device", "cpu", *given, *options])
    return capsys.readouterr()


def continued(seed: int = 0, **options: object) -> tuple[str, torch.Tensor]:
    """Returns text and tokens as transformers' own generate gives them for the same weights."""
    tokens = torch.tensor([[int(word[1:]) + 4 for word in PROMPT.split()]])
    model = make_aha(eos_token_id=None)
    torch.manual_seed(seed)
    made = model.generate(tokens, max_new_tokens=NEW, pad_token_id=0, **options)
    words = [f"w{int(token) - 4}" for token in made[0] if int(token) > 3]
    return " ".join(words), made


def test_greedy_text_is_streamed_and_usage_is_that_of_its_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, usage = told(folder, capsys)
    expected, tokens = continued(do_sample=False)
    assert text.split() == expected.split() and len(text.split()) > 15
    routes = make_aha()(tokens, output_router_stats=True).routes
    fed = torch.stack(routes)[:, 0, :-1].float()  # [layers, tokens, routers]: the last token is never read
    rows = {line.split()[0]: line.split()[1:] for line in usage.splitlines()[-3:]}
    for layer in range(2):
        spans = (fed[layer, :12], fed[layer, 12:], fed[layer, 12:])
        assert rows[str(layer)] == [f"{span.mean():.1%}" for span in spans]
    assert rows["total"][:2] == [f"{fed[:, :12].mean():.1%}", f"{fed[:, 12:].mean():.1%}"]
    assert f"window of {WINDOW} tokens" in usage and f"12 prompt tokens, {NEW} new ones" in usage


def test_usage_beyond_the_window_leaves_out_generated_tokens_within_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, usage = told(folder, capsys, "--prompt", "w30 w31 w32")
    model = make_aha(eos_token_id=None)
    tokens = model.generate(torch.tensor([[34, 35, 36]]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    fed = torch.stack(model(tokens, output_router_stats=True).routes)[:, 0, :-1].float()
    generated, beyond = fed[:, 3:].mean(), fed[:, WINDOW:].mean()
    assert usage.splitlines()[-1].split()[2:] == [f"{generated:.1%}", f"{beyond:.1%}"]
    assert generated != beyond


def test_the_table_tells_of_sink_tokens() -> None:
    model = make_aha(aha_num_sink_tokens=2)
    with torch.no_grad(), UsageCounter(model, (0, 12)) as usage:
        model(random_tokens(1, 20))
    assert f"window of {WINDOW} tokens and 2 sink tokens\n" in usage_table(usage, model.config)


def test_a_checkpoint_gives_the_text_of_its_export(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, usage = told(folder, capsys)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    main(["--model", str(folder.parent / "ours"), "--max-new-tokens", str(NEW), "--device", "cpu"])
    again, more = capsys.readouterr()
    assert again == text and more.splitlines()[-4:] == usage.splitlines()[-4:]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_that_is_not_utf8_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w30 \xff"), "utf-8", errors))
    with pytest.raises(UserError, match="standard input is not UTF-8"):
        main(["--model", str(folder), "--device", "cpu"])


def test_more_tokens_than_the_model_has_positions_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    fits = positions - len(PROMPT.split())
    assert "warning" not in told(folder, capsys, "--max-new-tokens", str(fits))[1]
    usage = told(folder, capsys, "--max-new-tokens", str(fits + 1))[1]
    assert f"more than the {positions} positions" in usage


def test_sampling_follows_the_seed_and_beams_are_searched(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = [told(folder, capsys, "--temperature", "1.5", "--seed", seed)[0] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].split() == continued(1, do_sample=True, temperature=1.5)[0].split()
    narrow = told(folder, capsys, "--temperature", "1.5", "--top-p", "0.0001", "--seed", "1")[0]
    assert narrow.split() == continued(do_sample=False)[0].split() != drawn[0].split()
    beams = told(folder, capsys, "--num-beams", "3")[0]
    assert beams.split() == continued(do_sample=False, num_beams=3)[0].split()


def test_kernels_give_the_same_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(folder, capsys, "--attention", "aha_kernels")[0] == told(folder, capsys)[0]


def test_a_chat_template_frames_the_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = told(folder, capsys, "--chat")
    assert text.startswith(f"w1 {PROMPT} w2 ")


def test_what_a_tokenizer_adds_is_added_once_and_not_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, processors

    copy = Path(shutil.copytree(folder, tmp_path / "beginning"))
    backend = Tokenizer.from_file(str(copy / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(copy / "tokenizer.json"))
    for options, start, tokens in (((), PROMPT, 13), (("--chat",), f"w1 {PROMPT} w2", 14)):
        text, usage = told(copy, capsys, *options)
        assert text.startswith(start) and f"{tokens} prompt tokens" in usage


@pytest.mark.parametrize("beams", ["1", "2"])
def test_text_ends_with_any_of_the_ends_of_a_folder_without_padding(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], beams: str
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "ends"))
    _, tokens = continued(do_sample=False, num_beams=int(beams))
    last = int(tokens[0, 15])
    settings = json.loads((copy / "generation_config.json").read_text())
    settings |= {"eos_token_id": [2, last], "pad_token_id": None, "do_sample": True, "top_k": 5}
    (copy / "generation_config.json").write_text(json.dumps(settings))
    _, expected = continued(do_sample=False, num_beams=int(beams), eos_token_id=[2, last])
    text, usage = told(copy, capsys, "--num-beams", beams)
    words = [f"w{int(token) - 4}" for token in expected[0] if int(token) > 3]
    assert text.split() == words and expected.shape[1] < tokens.shape[1]
    assert f"{expected.shape[1] - 12} new ones" in usage and "generation flags" not in usage


def test_a_dense_model_says_that_it_is_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_llama().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "100%, a model without routers" in told(tmp_path, capsys)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0"], "--temperature 0.0 must be above 0; leave it out"),
        (["--top-p", "1.5"], "--top-p 1.5 must be"),
        (["--num-beams", "0"], "--num-beams 0 must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be"),
        (["--prompt", ""], "--prompt is empty"),
        (["--temperature", "1", "--seed", "-1"], "--seed -1 must be from 0 to 4294967295"),
        (["--device", "gpu"], "--device gpu is neither cpu nor cuda"),
        (["--device", "cuda:99"], r"--device cuda:99, but torch .* finds \d GPUs here"),
        (["--dtype", "fp31"], "--dtype fp31 is not one of"),
    ],
)
def test_options_without_a_meaning_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        told(folder, capsys, *options)


def test_what_is_no_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--model: there is no '.*nothing'; give a Hugging Face folder"):
        told(tmp_path / "nothing", capsys)
    make_llama().save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="bare has no tokenizer"):
        told(tmp_path / "bare", capsys)


def test_padding_is_not_counted_and_shifts_no_bucket() -> None:
    model = make_aha()
    tokens = random_tokens(1, 20)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens], dim=1)
    mask = (padded > 0).long()
    with torch.no_grad(), UsageCounter(model, (0, 7)) as alone:
        model(tokens)
    with torch.no_grad(), UsageCounter(model, (0, 7)) as shifted:
        model(padded, attention_mask=mask)
    stats = model(tokens, output_router_stats=True)
    assert torch.allclose(alone.per_router(), stats.router_usage.double())
    assert torch.allclose(alone.per_router(beyond_window=True), stats.router_usage_beyond_window.double())
    for bucket in (0, 1):
        assert torch.equal(alone.per_router(bucket), shifted.per_router(bucket))
    assert not torch.equal(alone.per_router(0), alone.per_router(1))


def test_tokens_within_their_window_have_no_usage_beyond_it() -> None:
    model = make_aha()
    set_routes(model, "all")
    with torch.no_grad(), UsageCounter(model) as usage:
        model(random_tokens(1, WINDOW))
        assert usage.total() == 1.0 and usage.total(beyond_window=True) is None
        model(random_tokens(1, WINDOW + 1))
    assert usage.total(beyond_window=True) == 1.0
    assert len(usage.per_layer()) == 2
