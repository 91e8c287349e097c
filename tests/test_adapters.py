"""Deltas for others: PEFT adapters, compact files, several deltas in one model, what a cast leaves.

With the real PEFT library, on tiny models: an adapter and the merged model have the same logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Runner
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_cli import cli
from torch import Tensor
from transformers import AutoModelForCausalLM

import dualsft
from dualsft.errors import ConfigError
from dualsft.integrations.peft import write_adapter
from dualsft.model.delta import COMPACT, Delta, compact, merge
from dualsft.model.resolve import weights_hash
from dualsft.storage.gaps import to_gaps
from dualsft.storage.manifest import FORMAT_VERSION, seal
from dualsft.system.paths import RunPath

Folders = Callable[[str], Path]
IDS = torch.arange(3, 15).view(1, -1)
UP, DOWN = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def made_delta(base: Path, target: Path, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """A delta with another number of entries in every linear weight of the blocks."""
    rng = torch.Generator().manual_seed(seed)
    model, indices = loaded(base, dtype), {}
    for at, (name, p) in enumerate(model.named_parameters()):
        if p.ndim == 2 and ".layers." in name:
            index = torch.randperm(p.numel(), generator=rng)[: 5 + 7 * at].sort().values
            with torch.no_grad():
                p.view(-1)[index] += 0.2 * torch.randn(len(index), generator=rng).to(dtype)
            indices[name] = index
    values = {n: model.get_parameter(n).detach().view(-1)[i] for n, i in indices.items()}
    Delta(indices, values, base.name, weights_hash(base)).save(target)
    return target


@pytest.fixture(scope="module")
def base(model_folder: Folders) -> Path:
    return model_folder("llama")


@pytest.fixture(scope="module")
def deltas(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("deltas")
    return [made_delta(base, folder / f"{seed}.safetensors", seed) for seed in (1, 2)]


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shira", "sparse"])
def test_an_adapter_is_the_merged_model(
    kind: Any, base: Path, deltas: list[Path], tmp_path: Path
) -> None:
    """Loaded, switched off, saved again, merged, unloaded."""
    merge(str(base), deltas[:1], tmp_path / "merged")
    plain, wanted = logits(loaded(base)), logits(loaded(tmp_path / "merged"))
    assert not torch.allclose(plain, wanted, atol=1e-2)
    made = write_adapter(str(base), deltas[0], tmp_path / "adapter", kind)
    assert made.num_entries == Delta.load(deltas[0]).num_entries < made.num_stored
    model: Any = PeftModel.from_pretrained(loaded(base), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    model.save_pretrained(str(tmp_path / "again"))
    again: Any = PeftModel.from_pretrained(loaded(base), str(tmp_path / "again")).eval()
    torch.testing.assert_close(logits(again), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(model.unload()), plain)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-5, atol=1e-5)
    for name, p in loaded(tmp_path / "merged").named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), p, rtol=1e-6, atol=1e-7)


def test_stock_peft_loads_a_shira_adapter_without_this_package(
    base: Path, deltas: list[Path], tmp_path: Path
) -> None:
    """The folder is one that PEFT itself knows; the small kind says what it needs."""
    for kind, named in (("shira", "SHIRA"), ("sparse", "DUALSFT_SPARSE")):
        if kind == "shira":
            write_adapter(str(base), deltas[0], tmp_path / kind)
        else:
            words = ("adapter", str(base), str(deltas[0]), str(tmp_path / kind))
            assert " entries written to " in cli("export", *words, "--kind", kind).stdout
        config = json.loads((tmp_path / kind / "adapter_config.json").read_text())
        assert config["peft_type"] == named and config["base_model_name_or_path"] == base.name
        card = (tmp_path / kind / "README.md").read_text()
        assert ("import dualsft" in card) == (kind == "sparse")
        assert str(base.parent) not in card + json.dumps(config)
    sizes = [
        (tmp_path / k / "adapter_model.safetensors").stat().st_size for k in ("shira", "sparse")
    ]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize("kind", ["shira", "sparse"])
def test_several_adapters_on_one_base(
    kind: Any, base: Path, deltas: list[Path], tmp_path: Path
) -> None:
    """Switching between them, and their weighted sum, which is that of the deltas."""
    model: Any = None
    for name, delta in zip("ab", deltas, strict=True):
        write_adapter(str(base), delta, tmp_path / name, kind)
        merge(str(base), [delta], tmp_path / f"merged-{name}")
        if model is None:
            model = PeftModel.from_pretrained(loaded(base), str(tmp_path / name), name).eval()
        else:
            model.load_adapter(str(tmp_path / name), name)
    for name in "aba":
        model.set_adapter(name)
        wanted = logits(loaded(tmp_path / f"merged-{name}"))
        torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)
    merge(str(base), deltas, tmp_path / "sum", weights=[0.5, 1.0])
    model.base_model.set_adapter(["a", "b"])
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("a", 0.5)
    torch.testing.assert_close(
        logits(model), logits(loaded(tmp_path / "sum")), rtol=1e-5, atol=1e-5
    )


def test_what_no_adapter_can_hold_is_refused(
    base: Path, model_folder: Folders, tmp_path: Path
) -> None:
    tied = model_folder("llama_tied_bias")
    cases = {
        "model.norm.weight is not the weight of an nn.Linear": (base, "model.norm.weight"),
        "embed_tokens.weight is not the weight": (tied, "model.embed_tokens.weight"),
        "c_fc.weight is not the weight": (model_folder("gpt2"), "transformer.h.0.mlp.c_fc.weight"),
        "more than its": (base, UP),
    }
    for at, (said, (folder, name)) in enumerate(cases.items()):
        path, p = tmp_path / f"{at}.safetensors", loaded(folder).get_parameter(name).detach()
        count = p.numel() if name == UP else 3
        index = torch.arange(count)
        Delta({name: index}, {name: p.view(-1)[index] + 1}).save(path)
        with pytest.raises(ConfigError, match=said) as refused:
            write_adapter(str(folder), path, tmp_path / "out")
        assert "dualsft export merge" in str(refused.value)
        assert not (tmp_path / "out").exists()


def test_a_sparse_adapter_on_another_base_is_refused(
    base: Path, deltas: list[Path], tmp_path: Path
) -> None:
    """Gaps beyond a layer would write outside its memory: PyTorch does not check them."""
    write_adapter(str(base), deltas[0], tmp_path / "a", "sparse")
    file = tmp_path / "a/adapter_model.safetensors"
    tensors = load_file(file)
    key = next(name for name in tensors if name.endswith("shira_gaps"))
    tensors[key] = torch.full_like(tensors[key], torch.iinfo(tensors[key].dtype).max)
    tensors[key][-1] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="of a layer with"):
        PeftModel.from_pretrained(loaded(base), str(tmp_path / "a"))


# --- compact files --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compact_delta_merges_to_the_same_bits(
    dtype: torch.dtype, base: Path, tmp_path: Path
) -> None:
    delta, small = made_delta(base, tmp_path / "d", 3, dtype), tmp_path / "small"
    entries, error = compact(str(base), delta, small)
    assert entries == Delta.load(small).num_entries and error == 0
    moved = dualsft.extract_delta(loaded(base, dtype), tuned_by(base, delta, dtype)).num_entries
    assert entries == moved <= Delta.load(delta).num_entries
    results = []
    for path in (delta, small):
        merge(str(base), [path], tmp_path / f"merged-{path.name}")
        results.append(load_file(tmp_path / f"merged-{path.name}/model.safetensors"))
    assert all(torch.equal(results[1][n], t) and t.dtype == dtype for n, t in results[0].items())
    tensors = load_file(small)
    assert {t.dtype for n, t in tensors.items() if n.endswith(".gap")} == {torch.uint8}
    content = sum(t.numel() * t.itemsize for t in tensors.values())
    assert content <= (1.1 + dtype.itemsize) * entries


def tuned_by(base: Path, delta: Path, dtype: torch.dtype) -> Any:
    return dualsft.apply_delta(loaded(base, dtype), delta)


def test_a_lossy_delta_says_its_error(base: Path, deltas: list[Path], tmp_path: Path) -> None:
    small = tmp_path / "small"
    entries, error = compact(str(base), deltas[0], small, lossy=True)
    exact, rounded = (tuned_by(base, path, torch.float32) for path in (deltas[0], small))
    before = dict(loaded(base).named_parameters())
    wrong = change = 0.0
    for name, p in exact.named_parameters():
        wrong += (rounded.get_parameter(name).double() - p.double()).square().sum().item()
        change += (p.double() - before[name].double()).square().sum().item()
    assert error == pytest.approx((wrong / change) ** 0.5, rel=1e-3)
    assert 1e-4 < error < 2**-8
    delta = Delta.load(small)
    assert delta.dtype == torch.float32 and delta.num_entries == entries
    with pytest.raises(ConfigError, match="--lossy"):
        half = made_delta(base, tmp_path / "half", 4, torch.bfloat16)
        compact(str(base), half, tmp_path / "x", lossy=True)


def resaved(path: Path, tensors: dict[str, Tensor], **header: str) -> Path:
    """A compact delta with a right hash and whatever content: an attacker can compute hashes."""
    from dualsft.model.delta import _content_hash
    from dualsft.storage.vectors import ParamVector, save_tensors

    header = {"format": COMPACT, **header}
    stated = {
        **header,
        "sha256": _content_hash(ParamVector(tensors), {**header, "format": COMPACT}),
    }
    save_tensors(path, tensors, stated)
    return path


@pytest.mark.parametrize(
    ("gaps", "values"),
    [
        (torch.tensor([3, 255], dtype=torch.uint8), torch.ones(1)),  # ends without an index
        (torch.tensor([3, 4], dtype=torch.int64), torch.ones(2)),
        (torch.tensor([-3, 4], dtype=torch.int8), torch.ones(2)),
        (torch.tensor([[3], [4]], dtype=torch.uint8), torch.ones(2)),
        (torch.tensor([3, 4], dtype=torch.uint8), torch.ones(3)),
        (torch.tensor([3, 4], dtype=torch.uint8), torch.tensor([1.0, float("nan")])),
        (torch.tensor([3, 4], dtype=torch.uint8), torch.ones(2, dtype=torch.int32)),
        (torch.tensor([3, 4], dtype=torch.uint8), torch.ones(2).to(torch.float8_e4m3fn)),
        (None, torch.ones(2)),
    ],
)
def test_a_malformed_compact_delta_is_refused(
    gaps: Tensor | None, values: Tensor, base: Path, tmp_path: Path
) -> None:
    tensors = {f"{UP}.val": values, f"{UP}.idx": torch.tensor([3, 4])}
    tensors |= {} if gaps is None else {f"{UP}.gap": gaps}
    with pytest.raises(ConfigError, match="gap must be"):
        Delta.load(resaved(tmp_path / "bad", tensors))


def test_a_delta_that_is_missing_is_not_called_damaged(base: Path, tmp_path: Path) -> None:
    """Neither is a folder, nor a fine-tuning without a delta; no cure removes a folder."""
    cure = "give the delta.safetensors of a run folder"
    stage = RunPath(tmp_path, "6_finetune")
    (stage / "model").mkdir(parents=True)
    for name, said in (("x/d", "no such file"), ("6_finetune", "is a folder")):
        with pytest.raises(ConfigError) as refused:
            merge(str(base), [tmp_path / name], tmp_path / "out")
        assert str(refused.value) == f"{tmp_path / name}: {said}; {cure}"
    body = {"format_version": FORMAT_VERSION, "stage": "finetune", "seconds": 1}
    body |= {"finished": "", "facts": {}, "fingerprint": {"hash": "", "settings": {}, "reads": {}}}
    seal(stage, body | {"peak_memory": {"rss_bytes": 1, "cuda_bytes": None}})
    path = tmp_path / "6_finetune/delta.safetensors"
    with pytest.raises(ConfigError) as refused:
        merge(str(base), [path], tmp_path / "out")
    said = f"this fine-tuning wrote no delta: use its merged model, {stage / 'model'}, or make"
    assert str(refused.value).startswith(f"{path}: no such file; {said}")
    path = tmp_path / "short.safetensors"
    path.write_bytes(b"{")
    with pytest.raises(ConfigError) as refused:
        Delta.load(path)
    assert str(refused.value).count(str(path)) == 1 and "remove" not in str(refused.value)


def test_a_compact_delta_outside_the_model_is_refused(base: Path, tmp_path: Path) -> None:
    count = loaded(base).get_parameter(UP).numel()
    for beyond, fits in ((count - 1, True), (count, False), (1 << 40, False)):
        if beyond < 1 << 30:
            gaps = to_gaps(torch.tensor([beyond]))
        else:  # as far as little content leads
            gaps = torch.full((1 << 16,), (1 << 16) - 1).to(torch.uint16)
            gaps[-1] = 0
        file = resaved(tmp_path / "far", {f"{UP}.gap": gaps, f"{UP}.val": torch.ones(1)})
        if fits:
            tuned_by(base, file, torch.float32)
            continue
        with pytest.raises(ConfigError, match="outside"):
            tuned_by(base, file, torch.float32)
    tensors = {f"{UP}.gap": to_gaps(torch.tensor([1])), f"{UP}.val": torch.ones(1)}
    with pytest.raises(ConfigError, match="added_in"):
        Delta.load(resaved(tmp_path / "typed", tensors, added_in="int8"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_hash": 5}, "'base_hash' in its header is 5, not text"),
        ({"base_hash": True}, "'base_hash' in its header is true, not text"),
        ({"base_hash": 1e308}, r"'base_hash' in its header is 1e\+308, not text"),
        ({"added_in": ["float32"]}, r"'added_in' in its header is \['float32'\], not text"),
        ({"added_in": "x" * 100_000}, "added_in 'x{56}..., which is not one of .*; copy the delta"),
        ({"format": "x" * 100_000}, "format 'x{56}..., not .*; give the delta.safetensors"),
        ({"base_model": "x" * 100_000}, "made from 'x{56}... with weights .*; give that base"),
        ({"data_offsets": [0.0, 1.0]}, "data_offsets of 'model.* are no whole numbers; copy it"),
        ({"data_offsets": ["0", "1"]}, "data_offsets of 'model.* are no whole numbers; copy it"),
        ({"shape": [1 << 80]}, "cannot be read"),
    ],
)
def test_a_header_of_other_values_is_refused(
    change: dict[str, Any],
    said: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A short message that names the file and the field, whatever the hash of the content."""
    monkeypatch.setattr("dualsft.model.delta._content_hash", lambda *_: "0")
    tensors = {f"{UP}.gap": torch.tensor([3], dtype=torch.uint8), f"{UP}.val": torch.ones(1)}
    content = resaved(tmp_path / "bad", tensors, base_hash="h").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    inner = header[f"{UP}.gap" if change.keys() & {"data_offsets", "shape"} else "__metadata__"]
    inner.update(change)
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + content[8 + size :]
    (tmp_path / "bad").write_bytes(whole)
    with pytest.raises(ConfigError, match=said) as caught:
        merge(str(base), [tmp_path / "bad"], tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path / 'bad'}: ") and len(str(caught.value)) < 1000


# --- several deltas, and what a cast leaves -------------------------------------------------------


def test_merging_several_deltas_reports_what_they_share(base: Path, tmp_path: Path) -> None:
    weight = loaded(base).get_parameter(UP).detach().view(-1)
    paths = []
    for at, (index, change) in enumerate({(0, 1): 0.5, (1, 2): 0.25}.items()):
        where = torch.tensor(index)
        paths.append(tmp_path / f"{at}.safetensors")
        Delta({UP: where}, {UP: weight[where] + change}).save(paths[-1])
    cli("export", "compact", str(base), str(paths[0]), str(tmp_path / "small"))
    words = (str(tmp_path / "small"), str(paths[1]), str(tmp_path / "out"), "--weight", "1")
    said = cli("export", "merge", str(base), *words, "--weight", "1").stdout
    assert "3 entries merged" in said and "1 of them are changed by several deltas" in said
    found = load_file(tmp_path / "out/model.safetensors")[UP].view(-1)
    torch.testing.assert_close(found[:3] - weight[:3], torch.tensor([0.5, 0.75, 0.25]))
    assert torch.equal(found[3:], weight[3:])
    with pytest.raises(ConfigError, match="one number per delta"):
        merge(str(base), paths, tmp_path / "x", weights=[1.0])


def test_values_of_several_dtypes_stay_exact(base: Path, tmp_path: Path) -> None:
    """The model of a mixed delta has a dtype that holds them all, not that of the first."""
    values = {DOWN: torch.ones(1, dtype=torch.float16), UP: torch.tensor([1.0001])}
    Delta(dict.fromkeys(values, torch.arange(1)), values).save(tmp_path / "d")
    merged = merge(str(base), [tmp_path / "d"], tmp_path / "out")
    assert merged.survival["float32"] == 2
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(found[name].view(-1)[:1], v.float()) for name, v in values.items())


def test_values_that_overflow_are_refused(base: Path, tmp_path: Path) -> None:
    """By a weight, a sum, a cast, or `added_in`; nothing is written, and no model is changed."""

    def made(name: str, value: float, dtype: torch.dtype = torch.float32) -> Path:
        Delta({UP: torch.arange(2)}, {UP: torch.tensor([value, 0.5], dtype=dtype)}).save(
            tmp_path / name
        )
        return tmp_path / name

    half, high, wide = (
        made("half", 6e4, torch.float16),
        made("high", 3.4e38),
        made("wide", 1e300, torch.float64),
    )
    tensors = {f"{UP}.gap": to_gaps(torch.arange(2)), f"{UP}.val": torch.tensor([1e5, 0.5])}
    added = resaved(tmp_path / "added", tensors, added_in="float16")
    out, model = tmp_path / "out", loaded(base)
    before = model.get_parameter(UP).detach().clone()
    attempts: list[Callable[[], object]] = [
        lambda: merge(str(base), [half], out, weights=[2.0]),
        lambda: merge(str(base), [half, half], out),
        lambda: merge(str(base), [high], out, dtype="float16"),
        lambda: merge(str(base), [high], out, dtype="bfloat16", stochastic=True),
        lambda: merge(str(base), [added], out),
        lambda: compact(str(base), added, out),
        lambda: compact(str(base), wide, out, lossy=True),
        lambda: write_adapter(str(base), wide, out, "sparse"),
        lambda: dualsft.combine_deltas(model, [Delta.load(high)], [1e4]),
        lambda: dualsft.apply_delta(model, wide),
        lambda: dualsft.apply_delta(model, added),
    ]
    for attempt in attempts:
        with pytest.raises(
            ConfigError, match=rf"{UP}: 1 of its 2 .* overflow in .*\ngive a smaller"
        ):
            attempt()
    assert not out.exists() and torch.equal(model.get_parameter(UP), before)


def test_survival_counts_what_a_cast_leaves(base: Path, tmp_path: Path) -> None:
    """1 + 1e-4 is 1 in both serving dtypes, 1 + 1e-3 only in bfloat16, 1.5 in none."""
    model = loaded(base)
    with torch.no_grad():
        model.get_parameter(UP).view(-1)[:4] = 1.0
    model.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).write_bytes((base / name).read_bytes())
    values = torch.tensor([1.0001, 1.001, 1.5, 1.0])
    Delta({UP: torch.arange(4)}, {UP: values}).save(tmp_path / "d")
    merged = merge(str(tmp_path / "base"), [tmp_path / "d"], tmp_path / "out")
    assert merged.survival == {"float32": 3, "bfloat16": 1, "float16": 2}
    assert "3 in float32; after a cast 1 in bfloat16, 2 in float16" in merged.lines("merged")[-1]


def test_stochastic_rounding_keeps_small_changes_on_average(base: Path, tmp_path: Path) -> None:
    """A change of a tenth of bfloat16's distance moves one entry in ten, to its neighbour."""
    old = loaded(base, torch.bfloat16).float().get_parameter(UP).detach().view(-1)
    step = torch.nextafter(old.bfloat16(), torch.full_like(old, 9.0).bfloat16()).float() - old
    Delta({UP: torch.arange(len(old))}, {UP: old + 0.1 * step}).save(tmp_path / "d")
    counts = {}
    for stochastic in (False, True):
        out = tmp_path / f"{stochastic}"
        merge(str(base), [tmp_path / "d"], out, "bfloat16", stochastic=stochastic)
        found = load_file(out / "model.safetensors")[UP].view(-1).float()
        assert bool(((found == old) | (found == old + step)).all())
        counts[stochastic] = int((found != old).sum())
    assert counts[False] == 0
    assert counts[True] == pytest.approx(0.1 * len(old), rel=0.25)
    with pytest.raises(ConfigError, match="--stochastic"):
        merge(str(base), [tmp_path / "d"], tmp_path / "x", stochastic=True)


def test_the_run_says_what_a_cast_leaves(make_run: Runner, base: Path) -> None:
    """summary.json, the report and the card; counted here from the two models."""
    run = make_run("finetune.lr=1e-4")
    summary = json.loads((run / "6_finetune/summary.json").read_text())
    old = dict(loaded(base).named_parameters())
    new = load_file(run / "6_finetune/model/model.safetensors")
    delta = Delta.load(run / "6_finetune/delta.safetensors")
    for label, count in summary["survival"].items():
        dtype = getattr(torch, label)
        wanted = sum(int((old[n].to(dtype) != new[n].to(dtype)).sum()) for n in delta.indices)
        assert count == wanted, label
    left = summary["survival"]
    assert 0 < left["bfloat16"] < left["float16"] < left["float32"] <= summary["changed_entries"]
    for page in ("report.md", "report.html", "model_card.md"):
        text = (run / page).read_text()
        assert f"{left['bfloat16']:,} (" in text and "in bfloat16" in text, page
