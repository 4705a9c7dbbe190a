"""Datasets in every format: the same rows, the same fingerprint, the same order; and what is refused of them."""

import logging
import shutil

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from april import config as configuration
from april.broker.header import check_header, make_header
from april.broker.journal.files import JournalError
from april.broker.prompts import PromptBook
from april.config import ConfigError, DataSection, SourceSection
from april.data import dataset as module
from april.data.dataset import epoch_order, load_dataset, mixed_order, rows_per_epoch
from april.data.records import BATCH_ROWS
from april.data.rows import DatasetRow
from april.launch.findings import Findings
from april.launch.row_checks import inspect_rows

RECORDS = [{"prompt": [{"role": "user", "content": f"{n}+0="}], "label": str(n), "noise": [n]} for n in range(600)]
ROWS = [DatasetRow(record["prompt"], record["label"]) for record in RECORDS]


def write_lines(path, records):
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def write_stream(path, records):
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


def save_to_disk(folder, records):
    """A folder as written by `datasets.Dataset.save_to_disk`: Arrow stream shards, with their names in state.json."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    half = len(records) // 2
    write_stream(folder / names[0], records[:half])
    write_stream(folder / names[1], records[half:])
    (folder / "dataset_info.json").write_text('{"features": {}}')
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_fingerprint": "0"}
    (folder / "state.json").write_bytes(orjson.dumps(state))
    return folder


def write_arrow_file(path, records):
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def write_parquet(path, records):
    parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=250)
    return path


def write_shards(folder, records):
    folder.mkdir()
    half = len(records) // 2
    write_parquet(folder / "train-00000-of-00002.parquet", records[:half])
    write_parquet(folder / "train-00001-of-00002.parquet", records[half:])
    return folder


def write_array(path, records):
    path.write_bytes(orjson.dumps(records))
    return path


FORMATS = {
    "rows.jsonl": write_lines,
    "rows.json": write_array,
    "rows.parquet": write_parquet,
    "stream.arrow": write_stream,
    "file.arrow": write_arrow_file,
    "saved": save_to_disk,
    "shards": write_shards,
}


def load(path, **keys):
    section = DataSection(path=path, **keys)
    return load_dataset(section.train_sources, section)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_in_the_same_order(tmp_path, name):
    assert len(RECORDS) > 2 * BATCH_ROWS
    dataset = load(FORMATS[name](tmp_path / name, RECORDS))
    assert [dataset[number] for number in range(len(dataset))] == ROWS
    assert dataset.fingerprint == load(write_lines(tmp_path / "again.jsonl", RECORDS)).fingerprint


def test_rows_beyond_what_memory_holds_go_to_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HELD_BYTES", 1000)
    dataset = load(write_lines(tmp_path / "rows.jsonl", RECORDS))
    assert dataset._file._rolled
    assert [dataset[number] for number in (599, 0, 300)] == [ROWS[599], ROWS[0], ROWS[300]]


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_line", ["{'prompt': 1}", '{"prompt": "p"', "[1]", '{"prompt": "p"}', '{"label": "l"}'])
def test_a_bad_row_stops_the_run_with_its_line_number(tmp_path, bad_line):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "label": "l"}\n\n' + bad_line + "\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 3: ") as refusal:
        load(path)
    assert "\n" not in str(refusal.value)


def test_bad_rows_are_skipped_with_their_count_and_line_numbers_where_configured(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "p", "label": "l"}\nnonsense\n{"prompt": 3, "label": "l"}\n{"prompt": "q", "label": "m"}\n'
    )
    with caplog.at_level(logging.WARNING):
        dataset = load(path, bad_rows="skip")
    assert [dataset[0], dataset[1]] == [DatasetRow("p", "l"), DatasetRow("q", "m")] and len(dataset) == 2
    assert dataset.bad_rows == 2
    assert "rows.jsonl, line 2: " in caplog.text and "rows.jsonl, line 3: " in caplog.text
    assert "2 bad rows skipped, 2 rows left" in caplog.text


NO_PROMPT = [*RECORDS[:300], {"prompt": [], "label": "l", "noise": []}]
REFUSED = {
    "a bad row of a table": ("rows.parquet", NO_PROMPT, {}, r"rows\.parquet, row 301: key 'prompt' = \[\]"),
    "a table without the wanted columns": (
        "rows.parquet", [{"question": "q", "final_answer": "a"}], {},
        r"'prompt' is missing .keys there: 'question', 'final_answer'",
    ),
    "bad rows alone": (
        "rows.jsonl", RECORDS, {"bad_rows": "skip", "label_key": "answer"}, r"has no rows; .* 600 were skipped",
    ),
    "no rows": ("rows.jsonl", [], {}, "has no rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_dataset_without_usable_rows_is_refused(tmp_path, case):
    name, records, keys, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        load(FORMATS[name](tmp_path / name, records), **keys)


def test_gsm8k_is_read_as_it_is_published_and_its_bad_rows_are_counted(tmp_path):
    """Both published forms: train.jsonl of grade-school-math, and the hub's main/train-00000-of-00001.parquet."""
    good = [{"question": f"{n}+{n}?", "answer": f"<<{n}+{n}={2 * n}>>\n#### {2 * n:,}"} for n in (4, 700)]
    bad = [{"question": "", "answer": "#### 1"}, {"question": "q", "answer": "I do not know"}]
    lines = write_lines(tmp_path / "train.jsonl", [good[0], *bad, {"question": "q"}, good[1]])
    hub = write_parquet(tmp_path / "train-00000-of-00001.parquet", [good[0], *bad, good[1]])
    for path, count in ((lines, 3), (hub, 2)):
        dataset = load(path, mapping="gsm8k", bad_rows="skip")
        assert [dataset[0].label, dataset[1].label] == ["8", "1400"] and len(dataset) == 2
        assert dataset.bad_rows == count and dataset.rewards == {"gsm8k"}
        with pytest.raises(ConfigError, match="key 'question' = ''"):
            load(path, mapping="gsm8k")


def test_what_cannot_be_read_is_refused(tmp_path):
    for name in ("rows.parquet", "rows.arrow", "rows.json"):
        (tmp_path / name).write_bytes(b"[no such thing")
        with pytest.raises(ConfigError, match=name):
            load(tmp_path / name)
    with pytest.raises(ConfigError, match=r"missing\.jsonl cannot be read"):
        load(tmp_path / "missing.jsonl")


BEGINNINGS = {
    b"\x1f\x8b\x08": "compressed by gzip.*unpack it",
    b"PAR1": r"is Parquet.*ending \.parquet",
    b"\xff\xfe{\x00": "UTF-16.*UTF-8",
    b"version https://git-lfs.github.com/spec/v1\n": "pointer of Git LFS.*git lfs pull",
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_file_with_the_wrong_extension_is_refused_with_its_actual_format(tmp_path, beginning, name):
    (tmp_path / name).write_bytes(beginning + b"something")
    with pytest.raises(ConfigError, match=rf"{name} .*{BEGINNINGS[beginning]}"):
        load(tmp_path / name)


@pytest.mark.parametrize("text", ['{"prompt": "p", "label": 1}', '[{"prompt": "p", "label": 1}]'])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, text):
    (tmp_path / "rows.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load(tmp_path / "rows.json")[0] == DatasetRow("p", "1")


def test_numbers_are_labels_as_the_file_spells_them(tmp_path):
    spelled = ["18446744073709551616", "-9223372036854775809", "1.10", "1e5", "0.30000000000000000001", "7" * 300]
    lines = "".join(f'{{"prompt": "p", "label": {text}}}\n' for text in spelled)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.json").write_text("[" + lines.strip().replace("\n", ",") + "]")
    for name in ("rows.jsonl", "rows.json"):
        dataset = load(tmp_path / name)
        assert [dataset[number].label for number in range(len(dataset))] == spelled


def test_a_number_of_32_bits_has_the_digits_that_it_was_written_with(tmp_path):
    labels = pa.array([0.1, 5.0, None, 1e-7], pa.float32())
    parquet.write_table(pa.table({"prompt": ["p"] * 4, "label": labels}), tmp_path / "rows.parquet")
    dataset = load(tmp_path / "rows.parquet", bad_rows="skip")
    assert [dataset[number].label for number in range(len(dataset))] == ["0.1", "5.0", "1e-07"]


BAD_LINES = {
    b'{"prompt": "p", "label": 1e400}': "write a number that large as text, in quotes",
    b'{"prompt": "p", "label": "a", "label": "b"}': "key 'label' occurs twice",
    b'{"prompt": [{"role": "user", "role": "tool", "content": "c"}], "label": "a"}': "key 'role' occurs twice",
    b'{"prompt": "p", "label": "\xff"}': "is not JSON.*write it as UTF-8",
    b'{"prompt": "p", "label": NaN}': "is not JSON",
    b'{"prompt": "p", "label": "\\ud800"}': "is not JSON",
    b'{"prompt": "p", "label": "a", "reward": "timeit:timeit"}': r"'timeit:timeit'.*reward\.allowed",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_duplicate_keys_and_invalid_json_are_bad_rows_with_their_line(tmp_path, line):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "p", "label": "a"}\n' + line)
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 2: .*{BAD_LINES[line]}"):
        load(tmp_path / "rows.jsonl")
    assert load(tmp_path / "rows.jsonl", bad_rows="skip").bad_rows == 1


def test_text_that_is_not_utf_8_makes_only_its_own_row_bad(tmp_path):
    labels = pa.array([b"1", b"\xff\xfe", b"3"]).cast(pa.string(), safe=False)
    table = pa.table({"prompt": ["a", "b", "c"], "label": labels})
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet, row 2: .*'label' .*UTF-8"):
        load(tmp_path / "rows.parquet")
    dataset = load(tmp_path / "rows.parquet", bad_rows="skip")
    assert [dataset[number].label for number in range(len(dataset))] == ["1", "3"]


@pytest.mark.parametrize("write", [write_lines, write_parquet, write_arrow_file])
def test_columns_with_dots_and_commas_in_their_names_are_read_from_every_format(tmp_path, write):
    name = {write_lines: "rows.jsonl", write_parquet: "rows.parquet", write_arrow_file: "rows.arrow"}[write]
    write(tmp_path / name, [{"q.text": "1+1=", "a,b": "2", "q": "no"}])
    dataset = load(tmp_path / name, prompt_key="q.text", label_key="a,b")
    assert dataset[0].label == "2"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_damaged_columnar_file_is_refused_with_its_name_and_the_fix(tmp_path, damage, name):
    write = {"rows.parquet": write_parquet, "rows.arrow": write_arrow_file}[name]
    data = bytearray(write(tmp_path / name, RECORDS).read_bytes())
    if damage == "flipped":
        data[100 : len(data) - 100 : 7] = bytes(len(data[100 : len(data) - 100 : 7]))
    (tmp_path / name).write_bytes({"cut": data[: len(data) // 2], "flipped": data, "empty": b""}[damage])
    with pytest.raises(ConfigError, match=rf"{name}( cannot be read|, row )") as refusal:
        load(tmp_path / name)
    assert "JSON object on each line" not in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_folder_is_read_in_the_order_of_file_names(tmp_path):
    for name, label in (("part-2.jsonl", "b"), ("part-1.jsonl", "a")):
        write_lines(tmp_path / name, [{"prompt": "p", "label": label}])
    dataset = load(tmp_path)
    assert [dataset[number].label for number in range(len(dataset))] == ["a", "b"]


def test_missing_shards_are_refused(tmp_path):
    for number in (0, 2):
        write_lines(tmp_path / f"train-{number:05d}-of-00003.jsonl", RECORDS[:4])
    with pytest.raises(ConfigError, match=r"1 of 3 shards.* 00001"):
        load(tmp_path)
    write_lines(tmp_path / "train-00001-of-00003.jsonl", RECORDS[:4])
    assert len(load(tmp_path)) == 12
    write_lines(tmp_path / "train-00000-of-00002.jsonl", RECORDS[:4])
    with pytest.raises(ConfigError, match=r"shards of 2 .*3"):
        load(tmp_path)


def test_blank_labels_are_counted_and_reported_once(tmp_path, caplog):
    dataset = load(write_lines(tmp_path / "rows.jsonl", [{"prompt": "p", "label": text} for text in ("1", "", " ")]))
    assert dataset.blank_labels == 2 and caplog.text.count("2 of 3 rows have a blank label") == 1


def test_folders_with_several_kinds_of_files_are_refused(tmp_path):
    save_to_disk(tmp_path / "dict" / "train", RECORDS[:4])
    save_to_disk(tmp_path / "dict" / "test", RECORDS[:4])
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"several splits.*dict/test, .*dict/train"):
        load(tmp_path / "dict")
    (tmp_path / "hub").mkdir()
    with pytest.raises(ConfigError, match="folder without"):
        load(tmp_path / "hub")
    write_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet", RECORDS[:4])
    write_parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", RECORDS[:4])
    with pytest.raises(ConfigError, match="files of test, train"):
        load(tmp_path / "hub")
    write_lines(tmp_path / "hub" / "more.jsonl", RECORDS[:4])
    with pytest.raises(ConfigError, match="several kinds"):
        load(tmp_path / "hub")
    (tmp_path / "plain").mkdir()
    for name in ("train", "test"):
        write_lines(tmp_path / "plain" / f"{name}.jsonl", RECORDS[:4])
    with pytest.raises(ConfigError, match="files of test, train"):
        load(tmp_path / "plain")
    for name in ("dict", "plain"):
        assert len(load(tmp_path / name, split="train")) == 4
        with pytest.raises(ConfigError, match=r"'data\.split' = 'dev' .*test, train"):
            load(tmp_path / name, split="dev")
    with pytest.raises(ConfigError, match=r"'data\.split' = 'train' .*no folder"):
        load(tmp_path / "plain" / "train.jsonl", split="train")


# --- order --------------------------------------------------------------------------------------------------


def test_an_epoch_hands_out_every_row_once():
    for shuffle in (True, False):
        assert sorted(epoch_order(1000, 3, 2, shuffle)) == list(range(1000))
        assert epoch_order(1000, 3, 2, shuffle).dtype == np.int64


def test_an_unshuffled_epoch_follows_the_file():
    assert epoch_order(5, 3, 2, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    assert mixed_order([3, 2], [1.0, 1.0], 3, 2, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_depends_on_seed_and_epoch_alone_and_never_changes():
    assert epoch_order(8, 0, 0, True).tolist() == epoch_order(8, 0, 0, True).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert mixed_order([8], [1.0], 0, 0, True).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    orders = [epoch_order(100, seed, epoch, True).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(map(tuple, orders))) == 4


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.25), (0.3, 3.5), (0.001, 1.0)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_weight_is_how_often_rows_are_drawn_in_an_epoch(weights, shuffle):
    counts, epochs = [40, 100], 20
    times = np.zeros(140, int)
    for epoch in range(epochs):
        order = mixed_order(counts, list(weights), 7, epoch, shuffle)
        assert [(order < 40).sum(), (order >= 40).sum()] == [
            rows_per_epoch(40, weights[0]),
            rows_per_epoch(100, weights[1]),
        ]
        np.add.at(times, order, 1)
    for part, weight in ((times[:40], weights[0]), (times[40:], weights[1])):
        assert part.max() - part.min() <= 1, "some row of a source is drawn more often than another"
        assert part.sum() == epochs * rows_per_epoch(len(part), weight)


def test_a_source_inherits_the_section_s_keys():
    sources = [{"path": "a"}, {"path": "b", "mapping": "plain"}, {"path": "c", "reward": "math", "label_key": "l"}]
    section = DataSection(sources=sources, mapping="deepmath", reward="exact", prompt_key="p", label_key="k")
    found = [(s.mapping, s.reward, s.prompt_key, s.label_key) for s in section.train_sources]
    assert found == [("deepmath", "exact", "p", "k"), ("plain", "exact", None, None), ("deepmath", "math", "p", "l")]


def test_the_fingerprint_changes_with_what_a_cursor_depends_on(tmp_path):
    first, second = write_lines(tmp_path / "a.jsonl", RECORDS[:9]), write_lines(tmp_path / "b.jsonl", RECORDS[9:20])

    def fingerprint(*sources, **keys):
        section = DataSection(sources=[SourceSection(**source) for source in sources], **keys)
        return load_dataset(section.train_sources, section).fingerprint

    both = [{"path": first}, {"path": second}]
    variants = [
        fingerprint(*both),
        fingerprint(*reversed(both)),
        fingerprint(both[0]),
        fingerprint(both[0], both[1] | {"weight": 2.0}),
        fingerprint(both[0], both[1] | {"reward": "exact"}),
        fingerprint(*both, shuffle=False),
        fingerprint(*both, prompt_as="text"),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint(*both) == variants[0]


# --- as the broker draws ------------------------------------------------------------------------------------


def draws(book, cursor, count):
    found = []
    for _ in range(count):
        epoch, position, tokens = book.draw(cursor)
        found.append((epoch, position, book.row(epoch, position).label, tokens))
        cursor = (epoch, position + 1)
    return found


def test_a_restarted_broker_continues_the_order_from_its_cursor(config_file, data_folder, tmp_path):
    few = write_lines(tmp_path / "few.jsonl", [{"question": f"0{n}*1+00=", "answer": n} for n in range(5)])
    sources = (
        f'[{{path = "{data_folder}/train.jsonl", weight = 0.5}}, '
        f'{{path = "{few}", weight = 2, prompt_key = "question", label_key = "answer", reward = "exact"}}]'
    )
    text = config_file.read_text().replace(f'path = "{data_folder}/train.jsonl"', f"sources = {sources}")
    config_file.write_text(text)
    config = configuration.load(config_file)
    whole = draws(book := PromptBook(config), (0, 0), 100)
    assert {epoch for epoch, *_ in whole} == {0, 1, 2}
    places = [place for *place, _, _ in whole]
    assert [book.source_of(*place) for place in places] == [int(book.row(*place).reward == "exact") for place in places]
    half = draws(PromptBook(config), (0, 0), 50)
    last_epoch, last_position = half[-1][:2]
    assert half + draws(PromptBook(config), (last_epoch, last_position + 1), 50) == whole


def test_too_long_prompts_are_left_out_and_counted_once(config_file, data_folder, tmp_path):
    path = write_lines(tmp_path / "long.jsonl", [{"prompt": "0" * n, "label": "0"} for n in (4, 40, 4, 50)])
    config = configuration.load(config_file, ["--data.path", str(path), "--data.max_prompt_tokens", "8"])
    book = PromptBook(config)
    assert {label for *_, label, _ in draws(book, (0, 0), 20)} == {"0"}
    assert book.counts() == {"rows": 4, "bad_rows": 0, "too_long": 2}


def test_a_prompt_has_a_hint_beside_it_unless_that_leaves_no_room_for_a_response(config_file, tmp_path):
    records = [{"prompt": "1+1=", "label": "2", "solution": "0" * length} for length in (3, 5000)]
    path = write_lines(tmp_path / "hints.jsonl", records)
    words = ["--data.path", str(path), "--data.hint_key", "solution", "--algorithm.divergence", "reverse_kl"]
    config = configuration.load(config_file, [*words, "--algorithm.hint", "{hint}={label}#{prompt}"])
    book = PromptBook(config)
    drawn = draws(book, (0, 0), 2)
    assert book.counts()["bad_rows"] == 1, "the context of the policy is shorter than the second hint"
    inspect_rows(config, book, found := Findings())
    assert "leave no room" in " ".join(found.warnings)
    epoch, position = drawn[0][:2]
    ids = np.frombuffer(book.hinted(epoch, position), "<i4")
    assert book.tokenizer.decode(ids) == "000=2#1+1="
    assert all(book.hinted(epoch, place) == b"" for place in range(2) if place != position)
    longer = configuration.load(config_file, [*words, "--algorithm.hint", "{hint}{prompt}" + "1" * 1000])
    with pytest.raises(JournalError, match=r"key 'algorithm.hint' was "):
        check_header(make_header(config, book), make_header(longer, book))
    sources = f'[{{path = "{path}"}}, {{path = "{path}", algorithm = {{divergence = ""}}}}]'
    of_two = ["--data.path", "none", "--data.sources", sources, *words[4:], "--algorithm.hint", "{label}{prompt}"]
    config = configuration.load(config_file, of_two)
    inspect_rows(config, divided := PromptBook(config), Findings())
    hinted = {(divided.source_of(0, place), bool(divided.hinted(0, place))) for place in range(4)}
    assert hinted == {(0, True), (1, False)} and not divided.counts()["bad_rows"]
    plain = PromptBook(configuration.load(config_file, ["--data.path", str(path)]))
    assert plain.hinted(epoch, position) == b"" and plain.fingerprint != book.fingerprint


def test_a_row_that_the_chat_template_refuses_is_left_out_and_counted(config_file, policy_folder, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(policy_folder, folder)
    template = "{{ messages[0].content if messages[0].content != 'no' else raise_exception('no') }}"
    (folder / "chat_template.jinja").write_text(template)
    records = [{"prompt": [{"role": "user", "content": text}], "label": text} for text in ("1", "no", "2")]
    path = write_lines(tmp_path / "chats.jsonl", records)
    config = configuration.load(config_file, ["--data.path", str(path), "--model.path", str(folder)])
    book = PromptBook(config)
    assert {label for *_, label, _ in draws(book, (0, 0), 12)} == {"1", "2"}
    assert book.counts() == {"rows": 3, "bad_rows": 1, "too_long": 0}


MAPPING = """
def mapping(record):
    return {"prompt": record["turns"][0]["value"], "label": record["answers"][-1]}

def nothing(record):
    return None
"""


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_mapping_of_one_s_own_makes_the_rows_and_what_it_raises_is_a_bad_row(tmp_path, monkeypatch, caplog, name):
    (tmp_path / "own_mapping.py").write_text(MAPPING)
    monkeypatch.syspath_prepend(tmp_path)
    records = [{"turns": [{"value": f"{row}+1="}], "answers": ["0", str(row + 1)]} for row in range(3)]
    FORMATS[name](tmp_path / name, [*records, {"turns": [], "answers": ["0"]}])
    data = DataSection(path=tmp_path / name, mapping="own_mapping:mapping", bad_rows="skip")
    dataset = load_dataset(data.train_sources, data)
    assert [(row.prompt, row.label) for row in map(dataset.__getitem__, range(3))] == [
        ("0+1=", "1"), ("1+1=", "2"), ("2+1=", "3"),
    ]  # fmt: skip
    assert dataset.bad_rows == 1 and "mapping 'own_mapping:mapping' raised IndexError" in caplog.text
    for mapping, said in (("own_mapping:nothing", "returned None; return a dictionary"), ("own_mapping:no", "has no")):
        data = DataSection(path=tmp_path / name, mapping=mapping, bad_rows="stop")
        with pytest.raises(ConfigError, match=said):
            load_dataset(data.train_sources, data)
