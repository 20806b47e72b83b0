"""Write the tables of the documentation from the results of the last runs.

    python -m benchmarks.report.tables [--check]

Rewrites the text between ``<!-- NAME: ... -->`` and ``<!-- /NAME -->`` in README.md and in docs, so that every figure
there is in a result file. ``--check`` writes nothing and lists the documents that are stale. Several tables show a
selection of their cases (`SHOWN`). The result files have all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = ("README.md", "docs/performance.md", "docs/quality.md", "docs/quantized.md", "docs/retrieval.md")
OURS = "lik_ops"
COLUMNS = (OURS, "late-interaction-kernels", "flash-maxsim", "eager", "compiled eager")
SHOWN = {
    "forward": (
        "rerank 1k",
        "rerank 1k prefix masks",
        "rerank 1k long",
        "rerank 100k",
        "rerank Lq 128",
        "serve 16x1k",
        "serve 64x10k",
        "in-batch 256",
        "candidates 256x16",
        "fat d 768",
        "pages 1x1k",
        "pages 64x64",
        "pages 64x64 winners",
        "tiny 8x8",
    ),
    "options": (
        "normalize 1x1k",
        "normalize 4x1k",
        "normalize 16x1k",
        "normalize 16x1k winners",
        "normalize pages 64x64",
        "normalize step 256x256",
        "winners 16x1k",
        "holes 4x1k",
        "weights 16x1k",
    ),
    "long": ("1 x 1 of 8192", "1 x 64 of 8192", "1 x 1 of 65536", "1 x 64 of 65536"),
    "head": ("1 x 1000", "16 x 1000", "holes 1 x 1000", "1 x 100", "384 to 128, 1 x 1000", "step 128 x 128"),
    "staged": ("20,000 documents, 2 bits", "200,000 documents, 2 bits", "2,000,000 documents, 2 bits"),
    "cpu": (
        "rerank",
        "rerank, winners",
        "rerank, bf16",
        "pages",
        "serve",
        "pairs",
        "candidates",
        "tiny",
        "training step",
    ),
}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def load(name: str, results: Path = RESULTS) -> dict:
    return json.loads((results / f"{name}.json").read_text())


def shown(name: str, records: list[dict]) -> list[dict]:
    """Return the records that a table shows, in the table's order."""
    names = SHOWN[name]
    return sorted((r for r in records if r["case"]["name"] in names), key=lambda r: names.index(r["case"]["name"]))


def timed(record: dict) -> dict[str, float]:
    """Milliseconds of the contenders that computed in the precision of the inputs."""
    return {name: r["ms"] for name, r in record["contenders"].items() if r.get("exact")}


def best_peer(record: dict) -> tuple[str, float] | None:
    """The fastest other contender that computed in the precision of the inputs."""
    others = {name: ms for name, ms in timed(record).items() if name != OURS}
    return min(others.items(), key=lambda item: item[1]) if others else None


def shape(case: dict) -> str:
    parts = [f"{case['Nq']} x {case['Nd']}, {case['Lq']}, {case['Ld']}, {case['d']}"]
    parts += [DTYPES[case["dtype"]]] if case["dtype"] != "bfloat16" else []
    return ", ".join(parts)


def machine(document: dict, *packages: str, cases: Iterable[str] | None = None) -> str:
    """Return where and with what a result was made: all of it, or the given cases."""
    env = document["environment"]
    names = [env["gpus"][0]] if env["gpus"] else [env["cpu"], f"{env['threads']} threads"]
    versions = [f"{name} {env['versions'][name]}" for name in packages if env["versions"].get(name)]
    text = ", ".join([*names, *versions, f"commit {(env['commit'] or 'unknown')[:7]}"])
    others: dict[str, list[str]] = {}
    for record in document["records"]:
        if "commit" in record and (cases is None or record["case"]["name"] in cases):
            where = f" on {record['gpus'][0]}" if "gpus" in record else ""
            others.setdefault(record["commit"][:7] + where, []).append(record["case"]["name"])
    rows = (f"row{'s' * (len(names) > 1)} {', '.join(map(repr, names))}: {run}" for run, names in others.items())
    return text + (f" ({'; '.join(rows)})" if others else "")


def label(case: dict) -> str:
    return case["name"] + ", winners" * (case["what"] == "winners" and "winners" not in case["name"])


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(entry: dict | None, best: float) -> str:
    if entry is None or "ms" not in entry:
        return "-"
    text = f"{entry['ms']:.4f}" + ("" if entry.get("exact", True) else " *")
    return f"**{text}**" if entry["ms"] == best else text


def forward(results: Path = RESULTS) -> str:
    document = load("forward", results)
    ceilings, versions = document["settings"]["ceilings"], document["environment"]["versions"]
    header = ["case", "shape", "roofline", "read"]
    header += [f"{name} {versions.get(name) or ''}".strip() if name != OURS else name for name in COLUMNS] + ["goal"]
    rows = []
    for record in shown("forward", document["records"]):
        case, best = record["case"], min(timed(record).values(), default=0)
        row = [label(case), shape(case), f"{record['floor_ms']:.4f}", f"{record['read_ms']:.4f}"]
        row += [cell(record["contenders"].get(name), best) for name in COLUMNS]
        rows.append([*row, f"{case['goal_ms']}" if case["goal_ms"] else ""])
    text = (
        f"{machine(document, 'torch', 'triton', cases=SHOWN['forward'])}. Rates measured in the same run:"
        f" {ceilings['tflops']:.0f} TFLOP/s (bf16 product of 8192 x 8192 matrices by cuBLAS) and {ceilings['gbs']:.0f}"
        f" GB/s (read of 4 GiB). An empty kernel takes {ceilings['empty_ms']:.4f} ms. `roofline`: the time of the"
        " operations or of the bytes at these rates, whichever is longer. `read`: a kernel that only reads as many"
        " bytes."
    )
    return f"{text}\n\n{table(header, rows)}"


def fp32(results: Path = RESULTS) -> str:
    """Return the table of fp32 inputs: the forward's cases, and einsum in both precisions of torch's products."""
    document, rows = load("forward", results), []
    for record in document["records"]:
        if record["case"]["dtype"] == "float32":
            entries = record["contenders"]
            row = [shape(record["case"]).removesuffix(", fp32"), "fp32"]
            rows.append([*row, *(cell(entries.get(name), 0) for name in COLUMNS[:4]), "-", "-"])
    precise = load("tf32", results)
    found = {(r["contender"], r["d"], r["precision"]): r for r in precise["records"]}
    Nq, Nd, Lq, Ld = precise["settings"]["sizes"]
    for d, precision in dict.fromkeys((r["d"], r["precision"]) for r in precise["records"] if r["d"] > 64):
        ours, einsum = (found[name, d, precision] for name in (OURS, "einsum"))
        row = [f"{Nq} x {Nd}, {Lq}, {Ld}, {d}", {"ieee": "fp32", "tf32": "TF32"}[precision]]
        row += [number(ours["ms"], 4), "-", "-", number(einsum["ms"], 4)]
        rows.append([*row, *(f"{r['most']:.0e}" for r in (ours, einsum))])
    text = (
        f"{machine(document, 'torch', 'triton', cases=())}; {precise['environment']['commit'][:7]} from 16 x 1000 on."
        " The rows before are from `python -m benchmarks.operators.forward --only fp32`. `*`: products of half"
        " precision. Errors are the largest relative errors of a score."
    )
    header = ["shape", "products", *COLUMNS[:4], f"error, {OURS}", "error, eager"]
    return f"{text}\n\n{table(header, rows)}"


def summary(results: Path = RESULTS) -> str:
    """Return the table of the README: the shapes with a goal, compared with the fastest other contender."""
    document = load("forward", results)
    rows, names = [], []
    for record in document["records"]:
        case, ours, peer = record["case"], record["contenders"][OURS], best_peer(record)
        if case["goal_ms"] is None or peer is None or "ms" not in ours:
            continue
        names.append(case["name"])
        row = [label(case), shape(case), f"{ours['ms']:.3f}", f"{ours['tflops']:.0f}"]
        rows.append([*row, f"{peer[1]:.3f} ({peer[0]})", f"{peer[1] / ours['ms']:.2f}x"])
    header = ["forward", "Nq x Nd, Lq, Ld, d", "ms", "TFLOP/s", "fastest other, ms", "speedup"]
    return f"{table(header, rows)}\n\n{machine(document, 'torch', 'triton', cases=names)}."


def find_case(name: str, case: str, results: Path) -> dict:
    """Return the record of a case in the results called `name`."""
    return next(record for record in load(name, results)["records"] if record["case"]["name"] == case)


def lead(results: Path = RESULTS) -> str:
    """Return the first paragraph of the README: a forward, a training step and the loss of a host library."""
    serve, step, loss = (
        find_case(name, case, results)
        for name, case in (("forward", "serve 16x1k"), ("training", "in-batch 256"), ("hosts", "cached PyLate"))
    )
    peer, peer_ms = best_peer(serve) or ("", 0.0)
    serve_ms = serve["contenders"][OURS]["ms"]
    ours, kernels, eager = (step["contenders"][name] for name in ("lik_ops lowmem", COLUMNS[1], "eager"))
    fast, slow = loss["contenders"][OURS], loss["contenders"]["PyLate"]
    gpus = {name: load(name, results)["environment"]["gpus"][0].split()[1] for name in ("forward", "hosts")}
    text = (
        "lik_ops computes MaxSim, the late-interaction score of ColBERT and ColPali, as differentiable PyTorch"
        " operators (`torch.ops.lik`) with Triton kernels. Plain PyTorch stores the similarity of every query token and"
        " every document token, `[Nq, Nd, Lq, Ld]`. lik_ops never stores this tensor, forward or backward."
        f" On an {gpus['forward']}, scoring {serve['case']['Nd']:,} documents of {serve['case']['Ld']} tokens against"
        f" {serve['case']['Nq']} queries of {serve['case']['Lq']} tokens ({DTYPES[serve['case']['dtype']]}, d"
        f" {serve['case']['d']}) takes {serve_ms:.3f} ms, {peer_ms / serve_ms:.1f} times as fast as the fastest"
        f" alternative ({peer}). Forward and backward of {step['case']['Nq']} queries and {step['case']['Nd']}"
        f" documents need {ours['ms']:.2f} ms and {ours['peak_mb']:.0f} MiB, compared with {kernels['ms']:.2f} ms and"
        f" {kernels['peak_mb']:.0f} MiB in the library {COLUMNS[1]} and {eager['ms']:.2f} ms and"
        f" {eager['peak_mb']:,.0f} MiB in plain PyTorch. On an {gpus['hosts']}, a step of PyLate's cached"
        f" contrastive loss ({loss['case']['Nq']} queries, documents of {loss['case']['Ld']:,} tokens, without the"
        f" encoder) needs {fast['ms']:.0f} ms and"
        f" {fast['peak_mb']:,.0f} MiB instead of {slow['ms']:.0f} ms and {slow['peak_mb']:,.0f} MiB."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def training(results: Path = RESULTS) -> str:
    document = load("training", results)
    names = ("lik_ops lowmem", "lik_ops unified", *COLUMNS[1:4])
    rows = []
    for record in document["records"]:
        entries, case = record["contenders"], record["case"]
        best = min(timed(record).values(), default=0)
        row = [case["name"], shape(case)]
        for name in names:
            text = cell(entries.get(name), best)
            row.append(f"{text} ({entries[name]['peak_mb']:.0f})" if text != "-" else text)
        rows.append([*row, f"{record['own_mb']:.0f}", f"{case['goal_ms']}" if case["goal_ms"] else ""])
    text = (
        f"{machine(document, 'torch', 'triton', *COLUMNS[1:3])}. Forward with argmax, and both gradients. In brackets:"
        " peak MiB beyond the inputs. `own`: MiB of gradients, argmax and scores. `*`: another argmax, because the"
        " similarities were rounded."
    )
    return f"{text}\n\n{table(['case', 'shape', *names, 'own', 'goal'], rows)}"


def loss(results: Path = RESULTS) -> str:
    """Return the table of the contrastive loss: milliseconds of a step, and its peak beyond the inputs."""
    document, rows = load("cross_entropy", results), []
    names = {OURS: OURS, "scores": "`F.cross_entropy` of `maxsim`", COLUMNS[2]: f"{COLUMNS[2]} fused loss"}
    names["flash-maxsim, scores"] = f"`F.cross_entropy` of {COLUMNS[2]}"
    for record in document["records"]:
        cells = (f"{r['ms']:.3f} ({r['peak_mb']:.0f})" for r in (record["results"][name] for name in names))
        rows.append([shape(record["case"]), *cells, f"{record['own_mb']:.0f}", number(record["goal_ms"], 2)])
    text = f"{machine(document, 'torch', 'triton', COLUMNS[2])}. `own`: MiB of the gradients."
    return f"{text}\n\n{table(['shape', *names.values(), 'own', 'goal'], rows)}"


def cpu(results: Path = RESULTS) -> str:
    document, intel = (load(name, results) for name in ("cpu", "cpu_intel"))
    others = {r["case"]["name"]: r["contenders"][OURS]["best"] for r in intel["records"]}
    rows = []
    for record in shown("cpu", document["records"]):
        kinds, name = {name: r["best"] for name, r in record["contenders"].items()}, record["case"]["name"]
        row = [name, shape(record["case"]), f"{kinds[OURS]['gflops']:.0f}", f"{kinds[OURS]['of_sgemm']:.2f}"]
        row += [f"{kinds[n]['gflops']:.0f}" if n in kinds else "-" for n in ("maxsim-cpu", "eager")]
        rows.append([*row, f"{others[name]['gflops']:.0f}", f"{others[name]['of_sgemm']:.2f}"])
    text = (
        f"{machine(document, 'torch', 'maxsim-cpu')}. Last two columns: {machine(intel, 'torch')}. GFLOP/s of the best"
        f" round, of {document['settings']['rounds']} on AMD and {intel['settings']['rounds']} on Intel. `of sgemm`:"
        " share of the machine's own 2048^3 fp32 product, timed in the same rounds."
    )
    header = ["case", "shape", OURS, "of sgemm", "maxsim-cpu", "eager", f"{OURS}, Intel", "of sgemm, Intel"]
    return f"{text}\n\n{table(header, rows)}"


HOST_PEERS = ("late-interaction-kernels", "flash-maxsim", "eager")
HOST_ROWS = {
    "`maxsim`": ("no grad", "lik_ops.maxsim", "late-interaction-kernels", "flash-maxsim", "eager einsum"),
    "`maxsim`, 40 lengths alternating": ("no grad", "lik_ops.maxsim, 40 lengths in turn"),
    "`maxsim`, 1 x 1000, int8 documents": ("no grad", "lik_ops.maxsim, 1 x 1000, int8"),
    "`maxsim_with_argmax`": ("no grad", "lik_ops.maxsim_with_argmax"),
    "`maxsim_soft`": ("no grad", "lik_ops.maxsim_soft"),
    "`retrieve`, `top_k=4`": ("no grad", "lik_ops.retrieve"),
    "training step": (
        "training",
        "step lowmem",
        "step, late-interaction-kernels",
        "step, flash-maxsim",
        "step, eager einsum",
    ),
    **{
        text: (
            kind,
            *(f"cross, {name}" for name in (OURS, f"{COLUMNS[1]} packed", f"{COLUMNS[2]} padded", "padded eager")),
        )
        for text, kind in (("`maxsim_varlen`", "ragged"), ("`maxsim_varlen`, step", "ragged step"))
    },
    **{
        f"compiled {text}": ("compiled", f"lik_ops.maxsim, {name}", "", "", f"einsum, {name}", f"nothing, {name}")
        for name, text in (
            ("forward", "forward"),
            ("step", "step"),
            ("step of an encoder", "step with projection and loss"),
        )
    },
}


def host(results: Path = RESULTS) -> str:
    """Return the table of host times: microseconds of calls of 8 x 8."""
    document = load("host", results)
    found = {(r["kind"], r["name"]): r["us"] for r in document["records"]}
    rows = []
    for text, (kind, *names) in HOST_ROWS.items():
        cells = [number(found.get((kind, name)), 0 if "step" in text else 1) for name in names]
        rows.append([text, *cells, *["-"] * (5 - len(cells))])
    text = (
        f"{machine(document, 'torch', 'triton')}. Host microseconds of calls of 8 x 8, Lq 32, Ld 64, d 64, bf16."
        " `empty operator`: a custom operator with the same arguments that returns tensors that exist already."
        " In the rows of `maxsim_varlen`, flash-maxsim and `eager` score padded documents."
    )
    text += f"\n\n{table(['call', OURS, *HOST_PEERS, 'empty operator'], rows)}"
    return f"{text}\n\n{first_calls(results)}"


def first_calls(results: Path = RESULTS) -> str:
    """Return a sentence on the first calls of a process."""
    document = load("first_calls", results)
    warm = [r["seconds"][0] for r in document["records"]]
    cold = [r["cold_in_parallel"]["seconds"][0] for r in document["records"]]
    return (
        f"The first call in a process takes {min(warm):.1f} to {max(warm):.1f} s with a filled compile cache, and"
        f" {min(cold):.1f} to {max(cold):.1f} s with an empty one ({len(warm)} functions,"
        f" `benchmarks/calls/first_calls.py`, {machine(document, 'torch', 'triton')})."
    )


RAGGED = {
    "lik_ops padded": "padded, prefix mask",
    "late-interaction-kernels packed": "late-interaction-kernels packed",
    "flash-maxsim packed": "flash-maxsim packed",
    "flash-maxsim padded": "flash-maxsim padded",
    "padded eager": "padded eager",
}


def factor(entry: dict | None, ours: float | None) -> str:
    """How many times longer another took than we did."""
    if ours is None or entry is None or "ms" not in entry:
        return "-"
    return f"{entry['ms'] / ours:.2f}x" + ("" if entry.get("exact", True) else " *")


def number(x: float | None, digits: int) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def ragged_rows(records: list[dict]) -> list[list[str]]:
    rows = []
    for record in records:
        entries, dense = record["contenders"], record.get("dense_mean", {})
        if not entries or "ratio_to_unmasked" in record:
            continue
        ours = entries.get(OURS, {})
        ms = ours.get("ms")
        row = [record["case"]["name"], shape(record["case"]), number(ms, 4), number(dense.get("ms"), 4)]
        row += [number(record.get("ratio_to_dense"), 2), number(record.get("of_floor"), 2)]
        row += [factor(entries.get(name), ms) for name in RAGGED]
        rows.append([*row, number(ours.get("peak_mb"), 0), number(ours.get("host_us"), 0)])
    return rows


def ragged(results: Path = RESULTS) -> str:
    if not (results / "ragged.json").exists():
        return "Not measured yet (`benchmarks/operators/ragged.py`)."
    document = load("ragged", results)
    text = (
        f"{machine(document, 'torch', 'triton', *COLUMNS[1:3])}. `shape` has the largest lengths. The mean is 0.3 of"
        " these. `dense`: the dense kernel on as many scores of documents that all have the mean length. `ratio`:"
        " lik_ops to `dense`, each divided by its operations (goal 1.15). `of roofline`: the roofline of the kept"
        " tokens, divided by the time of lik_ops. Other contenders: their time divided by the time of lik_ops. `peak`:"
        " MiB beyond the inputs. `host`: host microseconds of the call. `*`: another argmax, because the"
        " similarities were rounded."
    )
    header = ["case", "shape", OURS, "dense", "ratio", "of roofline", *RAGGED.values(), "peak", "host"]
    text = f"{text}\n\n{table(header, ragged_rows(document['records']))}"
    ratios = [r["ratio_to_unmasked"] for r in document["records"] if "ratio_to_unmasked" in r]
    holes, prefix = ([r[name] for r in ratios if name in r] for name in ("holes", "prefix"))
    if not holes or not prefix:
        return text
    return (
        f"{text}\n\nDense calls with a document mask take {min(holes):.2f} to {max(holes):.2f} times as long as no mask"
        f" (a tenth of the tokens masked here and there), and {min(prefix):.2f} to {max(prefix):.2f} times with prefix"
        " masks (documents of Ld / 2 to Ld tokens)."
    )


def retrieve_rows(records: list[dict]) -> list[list[str]]:
    rows = []
    for record in records:
        entries = record["contenders"]
        for name in (n for n in entries if n.split()[0] == OURS):
            ours, case = entries[name], record["case"]
            where = name.removeprefix(OURS).strip() or "on the GPU"
            row = [where, str(case["Nq"]), f"{case['Nd']:,}", number(record["floor_ms"], 2)]
            row.append(number(ours.get("ms"), 2))
            row += [number(ours.get(f"of_{of}"), 3) for of in ("floor", "sustained", "read")]
            row.append(f"{record['goal']}" if record["goal"] and where != "pageable" else "")
            rows.append(row + [factor(entries.get(other), ours.get("ms")) for other in COLUMNS[1:4]])
    return rows


def gpus(document: dict) -> list[str]:
    """Return the text and the table of searches over several GPUs."""
    text = (
        "`lik_ops.distributed.retrieve` with one process for each GPU over NCCL. The results have the bits of one GPU."
        f" {machine(document, 'torch')}, {document['settings']['gpus']} GPUs. `sustained` is the efficiency of"
        " consecutive calls without waiting in between."
    )
    rows = []
    for record in (r for r in document["records"] if "ms" in r["contenders"].get(OURS, {})):
        case, ours = record["case"], record["contenders"][OURS]
        row = [str(case["Nq"]), f"{case['Nd']:,}", f"{ours['one_ms']:.2f}", f"{ours['ms']:.2f}"]
        each = [record.get("parts", {}).get(f"{name}_ms") for name in ("local", "agree", "merge")]
        row += [number(None if times is None else max(times), 2) for times in each]
        rows.append([*row, f"{ours['efficiency']:.2f}", number(ours.get("sustained_efficiency"), 2)])
    header = ["queries", "documents", "one GPU, ms", "all, ms", "search alone", "agreement alone", "merge alone"]
    return [text, table([*header, "efficiency", "sustained"], rows)]


def retrieve(results: Path = RESULTS) -> str:
    parts = []
    if (results / "retrieve.json").exists():
        document = load("retrieve", results)
        parts.append(
            f"{machine(document, 'torch', 'triton', *COLUMNS[1:3])}. Median wall-clock milliseconds of whole calls."
            " Documents of 180 tokens, d 128, bf16, queries of 32 tokens, the best 100.\n\n"
            "- `roofline`: the time of the operations or bytes at the rates measured in the run, whichever is longer."
            " For documents in host memory or on disk, the time to copy their bytes from one pinned buffer.\n"
            "- `of sustained`: the time of plain bf16 products with as many operations, divided by the time of lik_ops."
            " Like a long search, these products run at the power limit of the GPU.\n"
            "- `of read`: the time of a kernel that only reads the corpus, divided by the time of lik_ops.\n"
            "- Other libraries: their time divided by the time of lik_ops. `*`: scores in less than fp32.\n"
            "- `-`: not supported, failed, or no time left. `benchmarks/results/retrieve.json` has the reason."
        )
        header = ["documents", "queries", "number", "roofline", OURS, "of roofline", "of sustained", "of read", "goal"]
        header += COLUMNS[1:4]
        parts.append(table(header, retrieve_rows(document["records"])))
        shares = [
            f"{ours['ms'] / record['full_ms']:.2f} ({name.removeprefix(OURS).strip()}, queries: {record['case']['Nq']})"
            for record in document["records"]
            for name, ours in record["contenders"].items()
            if "full_ms" in record and "ms" in ours
        ]
        if shares:
            parts.append(
                f"Searches of a tenth of the documents need these parts of a full search: {', '.join(shares)}."
            )
    for path in sorted(results.glob("retrieve_gpus*.json")):
        parts += gpus(load(path.stem, results))
    return "\n\n".join(parts) or "Not measured yet (`benchmarks/retrieval/retrieve.py`)."


def both(entry: dict | None, key: str, peak: str) -> str:
    """Milliseconds, and in brackets the peak."""
    return "-" if entry is None or key not in entry else f"{entry[key]:.2f} ({entry[peak]:.0f})"


def hosts(results: Path = RESULTS) -> str:
    if not (results / "hosts.json").exists():
        return "Not measured yet (`benchmarks/calls/hosts.py`)."
    document, rows = load("hosts", results), []
    for record in document["records"]:
        case, entries = record["case"], record["contenders"]
        chunk = f" by {case['chunk']}" if case["chunk"] else ""
        row = [case["name"], case["host"], shape(case) + chunk]
        both_and_eager = [entries.get(name) for name in (case["host"], OURS, "eager")]
        row += [both(entry, "ms", "peak_mb") for entry in both_and_eager]
        row += [both(entry, "scoring_ms", "scoring_peak_mb") for entry in both_and_eager[:2]]
        row.append(factor(both_and_eager[0], (both_and_eager[1] or {}).get("ms")))
        each = (
            " / ".join(f"{e[f'error_{x}']:.0e}" if e and f"error_{x}" in e else "-" for e in both_and_eager[:2])
            for x in "QD"
        )
        rows.append([*row, *each])
    text = (
        f"{machine(document, 'torch', 'triton', 'sentence-transformers', 'pylate')}. Forward and backward of the loss"
        " without an encoder. In brackets: peak MiB beyond the inputs. `eager`: the formula in plain torch. `scoring`:"
        " scores and their backward alone. `by`: queries that a loss with cached gradients scores at a time. `error`:"
        " relative error of a gradient with the host's scoring / with lik_ops, compared with the host's loss in fp64."
    )
    header = ["case", "host", "shape", "host's own", OURS, "eager", "scoring, host's own", f"scoring, {OURS}", "faster"]
    return f"{text}\n\n{table([*header, 'error of Q', 'error of D'], rows)}"


def options(results: Path = RESULTS) -> str:
    document, rows = load("options", results), []
    for record in shown("options", document["records"]):
        ms, case = record["ms"], record["case"]
        by_hand = number(ms.get("by hand"), 4)
        row = [case["name"], shape(case), number(ms["plain"], 4), number(ms["option"], 4), by_hand]
        rows.append([*row, f"{record['cost']:.2f}", f"{record['goal']:.2f}"])
    text = f"{machine(document, 'torch', 'triton')}. `cost`: the call with the option, divided by the plain call."
    text += " `by hand`: torch normalizes the tokens first."
    return f"{text}\n\n{table(['case', 'shape', 'plain', 'with option', 'by hand', 'cost', 'goal'], rows)}"


FORMATS = ("full", "int8", "int8 document", "int8 x int8", "int8 document x int8", "uint8", "fp8_e4m3")
FORMATS += ("fp8_e4m3 x fp8", "binary", "binary document", "binary document x int8", "rq4", "rq2", "rq1")
SEARCHES = ("full", "int8", "both", "full on the host", "both, full on the host")


def formats(results: Path = RESULTS) -> str:
    if not (results / "quantized.json").exists():
        return "Not measured yet (`benchmarks/operators/quantized.py`)."
    document = load("quantized", results)
    rows, searches, quality = [], [], []
    for record in document["records"]:
        case, ms, found = record["case"], record.get("ms", {}), record.get("quality", {})
        if "rescored" in record:
            row = [case["tokens"], f"{case['documents']:,}", *(number(ms.get(n), 2) for n in SEARCHES)]
            searches.append([*row, f"{record['rescored']:.3%}", f"{record['recall']:.2f}"])
        elif ms:
            peer = _find_fastest_peer(record)
            rows.append([shape(case), *(number(ms.get(name), 4) for name in FORMATS), _format_peer(record, peer)])
            off = (found.get(name) for name in (*FORMATS, peer))
            quality.append([shape(case), *(f"{q['error']:.0e}, {q['spearman']:.4f}" if q else "-" for q in off)])
    header = ["shape", *FORMATS, "fastest peer in 8 bits"]
    columns = ["tokens", "documents", "full", "int8", "two stages", "full, on the host", "two stages, on the host"]
    text = (
        f"{machine(document, 'torch', 'triton', 'flash-maxsim', 'late-interaction-kernels')}. Median device"
        " milliseconds on a flushed L2 cache, random unit tokens; shapes are `Nq x Nd, Lq, Ld, d`; `full` is bf16;"
        " `-` was not run.\n\n"
        f"{table(header, rows)}\n\nLargest error divided by the largest score, and Spearman's correlation, with"
        f" fp64 scores of full precision:\n\n{table(header, quality)}"
    )
    if rates := [row for record in document["records"] if (row := _rate_row(record))]:
        text += "\n\nMillion tokens that `quantize` encodes per second:\n\n"
        text += table(["shape", *FORMATS[1:]], rates)
    if not searches:
        return text + "\n\nSearches are not measured yet (`--only search`)."
    return (
        f"{text}\n\nMilliseconds of `retrieve` for the best 10 of one query"
        " among bf16 documents of 180 tokens, by the wall clock. `rescored`: the part of the documents that the second"
        f" stage scores; `recall`: that of int8 alone.\n\n{table([*columns, 'rescored', 'recall'], searches)}"
    )


def _find_fastest_peer(record: dict) -> str:
    """Return the peer with the least time in a record of formats, or an empty string."""
    ms = record["ms"]
    return min((name for name in ms if name.startswith(COLUMNS[1:3])), key=ms.__getitem__, default="")


def _format_peer(record: dict, peer: str) -> str:
    """Return the time and the name of a peer, and the commit if another run measured it."""
    commit = f", {record['peers_commit'][:7]}" if "peers_commit" in record else ""
    return f"{record['ms'][peer]:.4f} ({peer}{commit})" if peer else "-"


def _rate_row(record: dict) -> list[str]:
    """Return the rates of quantizing of a record, or nothing if they were not measured."""
    case, ms = record["case"], record.get("quantize_ms", {})
    tokens = case["Nd"] * case["Ld"] if ms else 0
    return [shape(case), *(number(tokens / ms[x] / 1e3 if x in ms else None, 0) for x in FORMATS[1:])] if ms else []


SHOWN_FORMATS = {
    "full": "bf16",
    "int8": "int8",
    "int8 document": "int8, scale per document",
    "int8 document x int8": 'the same, `query="int8"`',
    "fp8_e4m3": "FP8",
    "binary": "binary",
    "binary document x int8": 'binary, scale per document, `query="int8"`',
}


def quantized(results: Path = RESULTS) -> str:
    """Return the table of formats: milliseconds, and the fastest peer in 8 bits."""
    document, rows = load("quantized", results), []
    for record in (r for r in document["records"] if r.get("goals")):
        row = [shape(record["case"]), *(number(record["ms"].get(name), 4) for name in SHOWN_FORMATS)]
        rows.append([*row, _format_peer(record, _find_fastest_peer(record))])
    text = f"{machine(document, 'torch', 'triton', *COLUMNS[1:3])}. Formats have a scale per token unless said. The"
    text += " commit next to a peer says that another run measured it."
    return f"{text}\n\n{table(['shape', *SHOWN_FORMATS.values(), 'fastest peer in 8 bits'], rows)}"


def fidelity(results: Path = RESULTS) -> str:
    if not (results / "fidelity.json").exists():
        return "Not measured yet (`benchmarks/retrieval/fidelity.py`)."
    document = load("fidelity", results)
    of = {"random": "random unit tokens", "hashed": "the demo's encoder", "trained": "`train_colbert.py`'s"}
    columns = {"rate": ".2f", "mrr": ".3f", "error": ".1e", "spearman": ".4f", "recall10": ".3f", "recall100": ".3f"}
    rows = [
        [of[record["case"]["name"]], name, f"{r['bytes']:.0f}"]
        + [format(r[key], digits) if key in r else "-" for key, digits in columns.items()]
        for record in document["records"]
        for name, r in record["formats"].items()
    ]
    text = (
        f"{machine(document, 'torch')}. 1,000 documents; docstrings searched by their first paragraphs as in the demo"
        f" ({document['settings']['queries']} queries), scores of the CPU. Compared with full precision: the largest"
        " error divided by the largest score, Spearman's correlation of all scores, the part of its best that is found."
        " `rate`: million random tokens that `quantize` encodes in a second on one thread."
    )
    header = [
        "tokens",
        "format",
        "bytes a token",
        "rate",
        "MRR@10",
        "error",
        "Spearman",
        *(f"recall@{k}" for k in (10, 100)),
    ]
    return f"{text}\n\n{table(header, rows)}"


def judgments(results: Path = RESULTS) -> str:
    """Return the table of a trained model compared with human judgments and on known items."""
    document = load("quality", results)
    records = {r["case"]["name"]: r for r in document["records"]}
    people, known = records["human judgments"], records["known items"]
    rows = []
    for method, found in known["methods"].items():
        judged = people["correlations"].get(method, {})
        figures = [judged.get("pearson"), judged.get("spearman"), found["mrr"], found["hit"]]
        rows.append([method, *(number(x, 3) for x in figures)])
    text = (
        f"{machine(document, 'torch', 'sentence-transformers', 'transformers')}. {people['case']['texts']} judged"
        f" texts; {known['case']['queries']} known items in {known['case']['documents']} documents of"
        f" {known['case']['tokens'] / known['case']['documents']:.0f} tokens on average."
    )
    header = ["method", "Pearson", "Spearman", "MRR@10", "hit@10"]
    return f"{text}\n\n{table(header, rows)}"


def searches(results: Path = RESULTS) -> str:
    """Return the table of searches with a trained model, compared with full precision."""
    rows = [
        [record["case"]["name"], name, f"{r['kib']:.1f}", f"{r['recall10']:.3f}", f"{r['mrr']:.3f}"]
        for record in load("quality", results)["records"]
        for name, r in record.get("searches", {}).items()
    ]
    return table(["group", "search", "KiB per document", "recall@10 of full", "MRR@10"], rows)


def of_results(entries: dict, names: tuple[str, ...], scale: float, digits: int) -> list[str]:
    """Times of contenders, in milliseconds times `scale`."""
    ms = (entries.get(name, {}).get("ms") for name in names)
    return [number(None if x is None else x * scale, digits) for x in ms]


def long(results: Path = RESULTS) -> str:
    document, names = load("long", results), ("uncut", OURS, "read", *COLUMNS[1:3])
    rows = [
        [r["case"]["name"], *of_results(r["results"], names, 1000, 1), f"{r['share']:.2f}"]
        for r in shown("long", document["records"])
    ]
    text = f"{machine(document, 'torch', 'triton', *COLUMNS[1:3])}. Microseconds."
    return f"{text}\n\n{table(['documents', *names, 'of read rate'], rows)}"


def _cases(name: str, names: tuple[str, ...], note: str, results: Path, packages: tuple[str, ...] = ()) -> str:
    """Milliseconds of each case of a result that has contenders and a goal."""
    document = load(name, results)
    rows = []
    for r in shown(name, document["records"]) if name in SHOWN else document["records"]:
        case = [r["case"]["name"], *([shape(r["case"])] if "Nq" in r["case"] else [])]
        rows.append([*case, *of_results(r["results"], names, 1, 3), number(r["goal_ms"], 3)])
    shapes = ["shape"] if "Nq" in document["records"][0]["case"] else []
    text = f"{machine(document, 'torch', 'triton', *packages)}{note}"
    return f"{text}\n\n{table(['case', *shapes, *names, 'goal'], rows)}"


def soft(results: Path = RESULTS) -> str:
    note = (
        ". `learned`: with a gradient for the temperature. `hard`: `lik_ops.maxsim`. `compiled`, `eager`: the formula"
    )
    note += " in torch."
    return _cases("soft", (OURS, "learned", "hard", "compiled", "eager"), note, results)


def chamfer(results: Path = RESULTS) -> str:
    return _cases("chamfer", (OURS, COLUMNS[2], "eager"), ".", results, COLUMNS[2:3])


def head(results: Path = RESULTS) -> str:
    names, note = (
        (OURS, "by hand", COLUMNS[1], "unfused", "linear", "read"),
        (
            ". 768 features are projected to 128, unless the case says otherwise. `by hand`: `F.linear`, `F.normalize`"
            " and `lik_ops.maxsim`. `unfused`: tokens in a launch of their own, as for argmax. `linear`: the linear"
            " layer alone. `read`: the hidden states read once."
        ),
    )
    return _cases("head", names, note, results, COLUMNS[1:2])


def residual(results: Path = RESULTS) -> str:
    document, names = load("residual", results), ("codes", "codes, search", "decoded", COLUMNS[1])
    rows = [
        [
            r["row"]["name"],
            str(r["row"]["nbits"]),
            *(number(r["ms"].get(n), 4) for n in names),
            number(r["row"]["goal"], 3),
        ]
        for r in document["records"]
        if r["row"]["goal"] or r["row"]["name"].endswith("100k")
    ]
    text = (
        f"{machine(document, 'torch', 'triton', COLUMNS[1])}. Documents of 180 tokens, random codes among 16,384"
        " centroids. `codes`: `maxsim` of the codes. `codes, search`: `retrieve`. `decoded`: `maxsim` of the tokens in"
        " bf16."
    )
    return f"{text}\n\n{table(['case', 'bits', *names, 'goal'], rows)}\n\n{billion(results)}"


def billion(results: Path = RESULTS) -> str:
    """Return a sentence on the search of a billion tokens, and of fewer in host memory."""
    document = load("billion", results)
    (one, many), (one_host, many_host) = (
        [r for r in document["records"] if r["where"] == where] for where in ("device", "host")
    )
    return (
        f"{one['documents']:,} documents of 128 tokens at 2 bits ({one['bytes'] / 1e9:.0f} GB) take {one['ms']:.1f} ms"
        f" for one query and {many['ms']:.1f} ms for {many['Nq']} (goals {one['goal']:.0f} and {many['goal']:.0f}),"
        f" with {one['peak_bytes'] / 1e6:.0f} and {many['peak_bytes'] / 1e6:.0f} MB of workspace."
        f" {one_host['documents']:,} documents in host memory take {one_host['ms']:.1f} and {many_host['ms']:.1f}"
        f" ms ({machine(document, 'torch', 'triton')})."
    )


STAGED = {
    "exhaustive": "all codes",
    "8 probes, 4096 kept": "stages",
    "fast-plaid, 8 probes, 4096 kept": "fast-plaid",
}


def staged(results: Path = RESULTS) -> str:
    document = load("staged", results)
    found: dict[str, dict[str, dict]] = {}
    for r in document["records"]:
        case = found.setdefault(r["case"]["name"].removesuffix(", fast-plaid"), {})
        case.update(r.get("searches", {}))
    rows = []
    for case in SHOWN["staged"]:
        searches = [found[case][name] for name in STAGED]
        ms = [number(search[f"ms{n}"], 2) for n in (1, 64) for search in searches]
        rows.append([case, *ms, *(f"{search['recall']:.3f}" for search in searches)])
    names = [*SHOWN["staged"], *(f"{name}, fast-plaid" for name in SHOWN["staged"])]
    text = (
        f"{machine(document, 'torch', 'triton', 'fast-plaid', cases=names)}. Documents of 120 tokens in clusters."
        " Milliseconds of whole calls by the wall clock, for 1 query and for 64, and recall at 10 of what full"
        " precision finds. `stages` and `fast-plaid`: 8 probes, 4,096 documents kept."
    )
    header = [f"{name}, {what}" for what in ("1", "64", "recall") for name in STAGED.values()]
    return f"{text}\n\n{table(['documents', *header], rows)}"


def search(results: Path = RESULTS) -> str:
    """Return the table of searches: milliseconds, the share of the fastest possible, and the fastest peer."""
    document, rows = load("retrieve", results), []
    records = [r for r in document["records"] if r["case"]["name"] != "streamed 16"]
    for record in sorted(records, key=lambda r: (r["case"]["kind"] != "resident", r["case"]["Nq"])):
        entries, case = record["contenders"], record["case"]
        peers = {name: entries[name]["ms"] for name in COLUMNS[1:4] if "ms" in entries.get(name, {})}
        for name in (n for n in entries if n.split()[0] == OURS):
            ours, where = entries[name], name.removeprefix(OURS).strip() or "GPU"
            key, of = next((k, t) for k, t in SHARES.items() if k in ours and (k != "of_read" or case["Nq"] == 1))
            peer = min(peers, key=peers.__getitem__, default="")
            row = [where, str(case["Nq"]), f"{case['Nd']:,}", number(ours["ms"], 2), f"{ours[key]:.2f} of {of}"]
            rows.append([*row, f"{peers[peer] / ours['ms']:.2f}x ({peer})" if peer else "-"])
    text = (
        f"{machine(document, 'torch', 'triton', *COLUMNS[1:3])}. Milliseconds of whole calls by the wall clock."
        " `share`: of a kernel that only reads the corpus, of plain bf16 products with as many operations, of copies"
        " from one pinned buffer, or of a search of all documents."
    )
    header = ["documents in", "queries", "documents", OURS, "share", "fastest other"]
    return f"{text}\n\n{table(header, rows)}"


SHARES = {
    "share_of_full": "the full search",
    "of_sustained": "products",
    "of_read": "a read",
    "of_floor": "copies",
}


BLOCKS = {
    "lead": lead,
    "fp32": fp32,
    "loss": loss,
    "host": host,
    "search": search,
    "long": long,
    "soft": soft,
    "chamfer": chamfer,
    "head": head,
    "residual": residual,
    "staged": staged,
    "formats": formats,
    "fidelity": fidelity,
    "judgments": judgments,
    "searches": searches,
    "quantized": quantized,
    "forward": forward,
    "options": options,
    "summary": summary,
    "training": training,
    "cpu": cpu,
    "ragged": ragged,
    "retrieve": retrieve,
    "hosts": hosts,
}


COMMANDS = {
    name: f"python -m benchmarks.{script}"
    for name, script in {
        "forward": "operators.forward",
        "fp32": "operators.tf32",
        "options": "operators.options",
        "long": "operators.long",
        "training": "operators.training",
        "loss": "operators.cross_entropy",
        "hosts": "calls.hosts",
        "ragged": "operators.ragged",
        "quantized": "operators.quantized",
        "residual": "operators.residual",
        "staged": "retrieval.staged",
        "search": "retrieval.retrieve",
        "judgments": "retrieval.quality",
        "soft": "operators.soft",
        "head": "operators.head",
        "chamfer": "operators.chamfer",
        "cpu": "calls.cpu",
        "host": "calls.host",
    }.items()
}


def caption(name: str, results: Path) -> str:
    """Return the text of a block. It begins with the command that measures its table, if the block has one."""
    text = BLOCKS[name](results)
    is_measured = name in COMMANDS and not text.startswith("Not measured yet")
    return f"`{COMMANDS[name]}` on {text}" if is_measured else text


def rewritten(text: str, results: Path = RESULTS) -> str:
    """Return the document with every generated block rewritten."""

    def replace(match: re.Match) -> str:
        return f"{match['begin']}\n{caption(match['name'], results)}\n{match['end']}"

    pattern = r"(?P<begin><!-- (?P<name>\w+): [^\n]* -->)\n.*?(?P<end><!-- /(?P=name) -->)"
    return re.sub(pattern, replace, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document is stale")
    args = parser.parse_args()
    stale = []
    for path in (ROOT / name for name in DOCUMENTS):
        before = path.read_text()
        after = rewritten(before)
        if after != before:
            stale.append(path.name)
            if not args.check:
                path.write_text(after)
    print(f"{'stale' if args.check else 'rewritten'}: {', '.join(stale) or 'nothing'}")
    sys.exit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
