"""record.py: llama-bench's keys and formulas, ours beside them, and what each output format holds."""

import csv
import io
import json
from dataclasses import replace

import pytest

from mkdeploy.bench.compare import with_ratios
from mkdeploy.bench.record import LLAMA_BENCH_FIELDS, Record, join_tests, make_record, render
from mkdeploy.errors import UsageError
from tests.unit.engine_samples import SETTING, STATS, sample_hello, sample_loaded, sample_test

# test::get_fields() of tools/llama-bench/llama-bench.cpp in the pinned llama.cpp, copied.
LLAMA_BENCH = """
    build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch
    n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu no_kv_offload
    flash_attn devices tensor_split tensor_buft_overrides load_mode lazy_mode embeddings no_op_offload no_host repack
    fit_target fit_min_ctx n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts
""".split()
OURS = """
    memory_budget_bytes cache_slots expert_bytes n_moe_layer n_expert n_expert_used flash_bytes_per_token cache_hit_rate
    load_us_per_expert stall_us_per_token unique_experts_per_layer ttft_ms itl_ms_p50 itl_ms_p90 itl_ms_p99
    rss_peak_bytes majflt_per_token policy emulated device serial_model flags memory_cap page_cache
""".split()
# llama-bench's json types (get_field_type): the rest are strings.
INTEGERS = """
    build_number n_batch n_ubatch n_threads poll model_size model_n_params n_gpu_layers main_gpu n_prompt n_gen n_depth
    avg_ns stddev_ns no_op_offload n_cpu_moe fit_target fit_min_ctx flash_attn
""".split()
BOOLEANS = "no_kv_offload cpu_strict embeddings no_host repack".split()


def row(**setting: object) -> Record:
    return make_record(replace(SETTING, **setting), sample_hello(), sample_loaded(), sample_test())  # type: ignore[arg-type]


def test_llama_benchs_keys_come_first_and_in_its_order() -> None:
    assert list(LLAMA_BENCH_FIELDS) == LLAMA_BENCH
    keys = list(row().to_dict())
    assert keys[: len(LLAMA_BENCH)] == LLAMA_BENCH
    assert keys[-2:] == ["samples_ns", "samples_ts"]
    assert not set(OURS) - set(keys)


def test_values_have_llama_benchs_json_types() -> None:
    values = row().to_dict()
    for name in LLAMA_BENCH:
        kind = int if name in INTEGERS else bool if name in BOOLEANS else float if name.endswith("_ts") else str
        assert type(values[name]) is kind, name


def test_speed_is_the_mean_of_the_repetitions_speeds() -> None:
    record = row()
    assert record.samples_ts == (4.0, 2.0)
    assert (record.avg_ts, record.avg_ns) == (3.0, 1_500_000_000)
    assert record.stddev_ts == pytest.approx(2**0.5)
    assert record.test == "tg4"


def test_costs_are_per_token_of_all_repetitions() -> None:
    record = row()
    assert record.flash_bytes_per_token == 2 * STATS["read_bytes"] / 8
    assert record.stall_us_per_token == 2 * STATS["stall_us"] / 8
    assert record.majflt_per_token == 1.0
    assert record.cache_hit_rate == 0.75
    assert record.load_us_per_expert == 100.0
    assert record.unique_experts_per_layer == 8.0
    assert (record.ttft_ms, record.itl_ms_p50) == (2.0, 2.5)
    assert record.cache_slots == 8


def test_what_a_stock_model_does_not_have_is_null() -> None:
    test = sample_test(stats=[dict.fromkeys(STATS, 0)] * 2, itl_us=[[], []], ttft_us=[])
    record = make_record(replace(SETTING, load_mode="mmap"), sample_hello(), sample_loaded(), test)
    assert record.policy == "none"
    for name in ("flash_bytes_per_token", "cache_hit_rate", "load_us_per_expert", "ttft_ms", "itl_ms_p99"):
        assert getattr(record, name) is None


def test_repetitions_of_separate_processes_join() -> None:
    joined = join_tests([sample_test(), sample_test(rss_peak_bytes=2**30)])
    assert len(joined.samples_ns) == len(joined.stats) == len(joined.itl_us) == len(joined.majflt) == 4
    assert joined.rss_peak_bytes == 2**30


def test_the_ratio_is_the_median_of_the_repetitions_ratios() -> None:
    ours = replace(row(), samples_ts=(4.0, 9.0, 5.0))
    stock = replace(row(load_mode="mmap"), samples_ts=(1.0, 3.0, 1.0))
    first, second = with_ratios([ours], [stock])
    assert first.compare_ratios == (4.0, 3.0, 5.0)
    assert first.compare_ratio == 4.0
    assert second.compare_ratio is None
    assert "paged / mmap = 4.00 (median of 3 ratios, 3.00 to 5.00)" in render([first, second], "md")


def test_json_is_one_list_and_jsonl_one_object_a_line() -> None:
    records = [row(), row(cold=True)]
    assert json.loads(render(records, "json")) == [record.to_dict() for record in records]
    lines = render(records, "jsonl").splitlines()
    assert [json.loads(line)["cold"] for line in lines] == [False, True]


def test_csv_has_a_header_and_quotes_values_as_llama_bench_does() -> None:
    text = render([row()], "csv")
    header, values = csv.reader(io.StringIO(text))
    assert header[: len(LLAMA_BENCH)] == LLAMA_BENCH
    assert len(header) == len(values) and "samples_ns" not in header
    assert text.splitlines()[1].startswith('"abc123","0","cpu"')
    assert values[header.index("repack")] == "0"


def test_the_table_names_tests_as_llama_bench_does() -> None:
    table = render([row(), row(emulated=True)], "md").splitlines()
    cells = [cell.strip() for cell in table[0].strip("|").split("|")]
    assert cells[:4] == ["model", "size", "params", "backend"] and cells[-2:] == ["test", "t/s"]
    assert [cell.strip() for cell in table[2].strip("|").split("|")][-2:] == ["tg4", "3.00 ± 1.41"]
    assert "tg4 (emulated)" in table[3]
    assert len({len(line) for line in table[:4]}) == 1


def test_an_unknown_format_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="md, json, jsonl, csv"):
        render([row()], "sql")
