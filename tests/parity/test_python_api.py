"""Session, Store, run, bench and eval on a tiny package: what Python users and the command line get from the engine.

References are stock llama.cpp on the merged GGUF and plain NumPy, never the engine itself.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mkdeploy
from mkdeploy.bench.measure import BenchOptions, bench, measure
from mkdeploy.bench.record import LLAMA_BENCH_FIELDS
from mkdeploy.bindings.session import Session, Store, Token
from mkdeploy.convert.merge import merge
from mkdeploy.convert.pipeline import convert
from mkdeploy.engine.process import EngineOptions, SamplingOptions
from mkdeploy.errors import BudgetError, MkdeployError, UsageError
from mkdeploy.evaluate import evaluate
from mkdeploy.gguf_io import read_header
from mkdeploy.model_file import tokenize
from mkdeploy.run import run
from models.tiny import build_tiny

PROMPT = "The lighthouse keeper's daughter kept a notebook."
N_SLOTS, N_EXPERT = 5, 16  # one token uses 4
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.mkd, its merged.gguf and a text, of the tiny qwen2moe (which has a chat template)."""
    folder = tmp_path_factory.mktemp("api")
    convert(build_tiny("qwen2moe", folder / "source.gguf"), folder / "model.mkd")
    merge(folder / "model.mkd", folder / "merged.gguf")
    (folder / "text.txt").write_text("A clock wants to be left alone on a level shelf.\n" * 40)
    return folder


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:
    with Session(folder / "model.mkd", cache_slots=N_SLOTS, n_ctx=512, n_threads=1, use_extra_bufts=False) as session:
        yield session


def test_session_is_the_packages_front_door() -> None:
    assert mkdeploy.Session is Session


def test_infos_describe_the_package(session: Session, folder: Path) -> None:
    manifest = json.loads((folder / "model.mkd" / "manifest.json").read_text())
    info, memory, load = session.model_info, session.memory_info, session.load_info
    assert (info.n_expert, info.n_moe_layer) == (manifest["model"]["n_expert"], manifest["model"]["n_moe_layer"])
    assert info.expert_stride_bytes == manifest["layers"][0]["stride_bytes"]
    parts = (memory.resident_bytes, memory.kv_bytes, memory.compute_bytes, memory.slots_bytes)
    assert sum(parts) + memory.work_bytes + memory.other_bytes == memory.total_bytes
    assert memory.slots_per_layer == N_SLOTS
    assert load.load_us > 0
    assert session.meta("general.architecture") == "qwen2moe"
    assert session.meta("no.such.key") is None


def test_tokenizing_is_llama_cpps(session: Session, folder: Path) -> None:
    ids = session.tokenize(PROMPT)
    assert ids == tokenize(folder / "model.mkd" / "resident.gguf", PROMPT).tolist()
    assert session.detokenize(ids).strip() == PROMPT
    assert session.tokenize("", add_special=False) == []


def test_greedy_generation_is_argmax_of_stock_logits(session: Session, folder: Path) -> None:
    generated = session.generate(PROMPT, 12, temp=0)
    ids = session.tokenize(PROMPT)
    with Session(folder / "merged.gguf", load="none", n_ctx=512, n_threads=1, use_extra_bufts=False) as stock:
        stock.decode(ids)
        for token in generated.tokens:
            assert int(stock.logits(-1).argmax()) == token
            stock.decode([token])
    assert generated.n_prompt == len(ids)
    assert generated.n_generated == len(generated.tokens)
    assert session.generate(PROMPT, 12, temp=0).n_cached >= len(ids) - 1


def test_a_seed_repeats_and_callbacks_see_every_token(session: Session) -> None:
    seen: list[Token] = []
    first = session.generate(PROMPT, 16, seed=3, on_token=seen.append)
    assert tuple(token.id for token in seen) == first.tokens
    assert "".join(token.text for token in seen) == first.text
    assert session.generate(PROMPT, 16, seed=3).tokens == first.tokens
    assert first.seed == 3


def test_streaming_gives_the_same_tokens_and_can_be_left(session: Session) -> None:
    whole = session.generate(PROMPT, 16, temp=0).tokens
    assert tuple(token.id for token in session.stream(PROMPT, 16, temp=0)) == whole
    stream = session.stream(PROMPT, 400, temp=0)
    assert next(stream).id == whole[0]
    stream.close()  # type: ignore[attr-defined]
    assert session.generate(PROMPT, 16, temp=0).tokens == whole


def test_chat_messages_are_rendered_with_the_models_template(session: Session) -> None:
    text = session.apply_chat_template(MESSAGES)
    assert text == "[user]\nHi\n[assistant]\n"
    assert session.generate(MESSAGES, 8, temp=0).tokens == session.generate(text, 8, temp=0).tokens


def test_a_callback_may_stop_or_fail(session: Session) -> None:
    assert session.generate(PROMPT, 16, on_token=lambda token: False).stop == "interrupted"

    def fail(token: Token) -> None:
        raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError, match="in the callback"):
        session.generate(PROMPT, 16, on_token=fail)
    assert session.generate(PROMPT, 2).n_generated == 2


def test_hooks_see_routes_and_loads_and_their_errors_come_out(session: Session) -> None:
    routes: list[tuple[int, np.ndarray]] = []
    loads: list[tuple[int, ...]] = []
    session.set_hooks(on_route=lambda layer, ids: routes.append((layer, ids)), on_load=lambda *load: loads.append(load))
    session.cache_clear()
    session.reset_stats()
    session.decode(session.tokenize(PROMPT))
    used, n_expert = session.model_info.n_expert_used, session.model_info.n_expert
    n_tokens = len(session.tokenize(PROMPT))
    assert {ids.shape[1] for _, ids in routes} == {used}
    assert all(0 <= ids.min() and ids.max() < n_expert for _, ids in routes)
    assert sum(ids.shape[0] for layer, ids in routes if layer == routes[0][0]) == n_tokens
    assert sum(load[2] for load in loads) == session.stats.read_bytes > 0

    def fail(layer: int, ids: np.ndarray) -> None:
        raise ZeroDivisionError("in the hook")

    session.set_hooks(on_route=fail)
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        session.decode(session.tokenize(PROMPT))
    session.set_hooks()
    session.memory_remove()
    session.decode(session.tokenize(PROMPT))


def test_ctrl_c_stops_a_generation_and_leaves_the_session_usable(session: Session) -> None:
    began = threading.Event()

    def interrupt() -> None:
        began.wait(20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2000):  # the model may end its turn first
            session.generate(PROMPT, 400, on_token=lambda token: began.set())
    assert signal.getsignal(signal.SIGINT) is handler
    assert session.generate(PROMPT, 4).n_generated > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.decode([0], pos=[0, 1]), "pos has 2 entries for 1 tokens"),
        (lambda s: s.decode([10**6]), "1000000"),
        (lambda s: s.decode([]), "no tokens"),
        (lambda s: s.generate(""), "the prompt is empty"),
        (lambda s: s.generate([]), "the prompt is empty"),
        (lambda s: s.generate("x", grammar="no grammar"), "grammar"),
    ],
)
def test_wrong_arguments_are_usage_errors(session: Session, call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(session)  # type: ignore[operator]


def test_logits_that_were_not_asked_for_are_refused(session: Session) -> None:
    session.decode([1, 2, 3], output=[True, False, True])
    assert session.logits(0).shape == (session.model_info.n_vocab,)
    with pytest.raises(UsageError, match="token 1 of the last batch has no logits"):
        session.logits(1)


def test_a_closed_session_refuses_calls(folder: Path) -> None:
    with Session(folder / "model.mkd", n_ctx=64) as session:
        pass
    session.close()
    with pytest.raises(UsageError, match="is closed"):
        session.tokenize("x")


def test_opening_what_cannot_be_opened_is_one_error(folder: Path) -> None:
    with pytest.raises(BudgetError, match="at least"):
        Session(folder / "model.mkd", memory="1MiB")
    with pytest.raises(MkdeployError, match="nothing"):
        Session(folder / "nothing.mkd")
    with pytest.raises(UsageError, match="verify='maybe'"):
        Session(folder / "model.mkd", verify="maybe")  # type: ignore[arg-type]


def test_the_store_reads_experts_as_the_shard_holds_them(folder: Path) -> None:
    header = read_header(next((folder / "model.mkd").glob("experts-*.gguf")))
    with Store(folder / "model.mkd") as store:
        layer = next(n for n in range(100) if store.n_expert(n))
        expert = store.read(layer, 1)
        assert expert.shape == (store.expert_stride_bytes(layer),)
        tensors = [t for t in header.tensors if t.name.startswith(f"blk.{layer}.") and t.name.endswith(".1.weight")]
        data = header.path.read_bytes()
        for tensor in tensors:
            at = tensor.offset - tensors[0].offset
            assert expert[at : at + tensor.n_bytes].tobytes() == data[tensor.offset : tensor.offset + tensor.n_bytes]
        with pytest.raises(UsageError, match="there is no expert 99"):
            store.read(layer, 99)


# ---------------------------------------------------------------- the commands


OPTIONS = EngineOptions(cache_slots=N_SLOTS, n_ctx=512, n_threads=1)
GREEDY = SamplingOptions(temp=0.0)


def test_run_prints_the_text_that_a_session_generates(
    folder: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(folder / "model.mkd", engine=OPTIONS, sampling=GREEDY, prompt=PROMPT, n_predict=12)
    expected = session.generate(PROMPT, 12, temp=0)
    assert (result.tokens, result.text) == (expected.tokens, expected.text)
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == expected.text.rstrip("\n")
    assert "tok/s" in err and "hit rate" in err and "resident" in err


def test_run_json_and_one_turn_of_chat(folder: Path, session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder / "model.mkd", engine=OPTIONS, sampling=GREEDY, prompt="Hi", chat=True, n_predict=8, as_json=True)
    out = json.loads(capsys.readouterr().out)
    assert tuple(out["tokens"]) == session.generate(MESSAGES, 8, temp=0).tokens
    assert out["stats"]["cache_slots"] == N_SLOTS


def test_a_piped_chat_remembers(
    folder: Path, session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAgain\n/exit\nnever\n"))
    result = run(folder / "model.mkd", engine=OPTIONS, sampling=GREEDY, chat=True, n_predict=8)
    first = session.generate(MESSAGES, 8, temp=0).text
    conversation = [*MESSAGES, {"role": "assistant", "content": first}, {"role": "user", "content": "Again"}]
    assert result.tokens == session.generate(conversation, 8, temp=0).tokens


def test_bench_rows_have_llama_benchs_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = BenchOptions(n_prompt=(16,), n_gen=(8,), reps=2, cache_slots=(N_SLOTS, 0), n_threads=(1,))
    bench(folder / "model.mkd", options, output="json")
    rows = json.loads(capsys.readouterr().out)
    assert [(row["n_prompt"], row["n_gen"], row["cache_slots"]) for row in rows] == [
        *((16, 0, N_SLOTS), (0, 8, N_SLOTS)),
        *((16, 0, N_EXPERT), (0, 8, N_EXPERT)),
    ]
    for row in rows:
        assert not set(LLAMA_BENCH_FIELDS) - set(row)
        assert len(row["samples_ns"]) == 2
    assert rows[1]["flash_bytes_per_token"] > 0
    assert rows[3]["cache_hit_rate"] == 1.0  # warm, all experts


def test_bench_compares_with_stock_mmap(folder: Path) -> None:
    options = BenchOptions(n_prompt=(0,), n_gen=(8,), reps=2, cache_slots=(N_SLOTS,), n_threads=(1,), compare="mmap")
    ours, stock = measure(folder / "model.mkd", options)
    assert (ours.load_mode, stock.load_mode) == ("paged", "mmap")
    assert ours.compare_ratios is not None and len(ours.compare_ratios) == 2
    assert ours.memory_cap == stock.memory_cap and ours.memory_cap_bytes == stock.memory_cap_bytes


def test_eval_finds_no_difference_between_a_package_and_its_own_gguf(folder: Path) -> None:
    seen = evaluate(
        folder / "model.mkd", folder / "text.txt", against=folder / "merged.gguf", n_ctx=64, engine=OPTIONS, n_chunks=4
    )
    assert (seen.kl, seen.top1_agreement, seen.n_tokens) == (0.0, 1.0, 4 * 31)
    assert seen.ppl == seen.ppl_source


def test_eval_is_llama_perplexitys_formula(folder: Path) -> None:
    seen = evaluate(folder / "model.mkd", folder / "text.txt", n_ctx=64, engine=OPTIONS, n_chunks=3)
    nll: list[float] = []
    with Session(folder / "merged.gguf", load="none", n_ctx=64, n_threads=1, use_extra_bufts=False) as stock:
        ids = stock.tokenize((folder / "text.txt").read_text())
        bos = ids[0] if stock.model_info.add_bos else None
        for start in range(0, 3 * 64, 64):
            window = ids[start : start + 64]
            window = window if bos is None else [bos, *window[1:]]
            stock.memory_remove()
            stock.decode(window, output="all")
            for i in range(32, 63):
                row = stock.logits(i).astype(np.float64)
                nll.append(float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[window[i + 1]]))
    assert seen.ppl == pytest.approx(np.exp(np.mean(nll)), rel=1e-12)
    assert (seen.kl, seen.top1_agreement) == (None, None)


def test_a_session_works_beside_llama_cpps_own_python_module(folder: Path) -> None:
    """`import llama_cpp` maps one more copy of libggml-base; the engine must still find llama.cpp's registry."""
    code = (
        "import sys, llama_cpp; from mkdeploy import Session; s = Session(sys.argv[1], n_ctx=64);"
        "print(len(s.generate([1, 2, 3], 4, temp=0).tokens), s.stats.n_misses > 0)"
    )
    command = [sys.executable, "-c", code, str(folder / "model.mkd")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    n_tokens, paged = done.stdout.split()
    assert 1 <= int(n_tokens) <= 4 and paged == "True"
