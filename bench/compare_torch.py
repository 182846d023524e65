#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps in Farspan and in PyTorch on the same device, in turn, and their ratio.

Both train the same model (a Llama-family decoder with a tied head, random weights) on one row of random tokens a step, with
AdamW, in bf16 over fp32 weights on a GPU and in fp32 on a CPU. PyTorch does it as its users would: compiled blocks, scaled
dot-product attention by cuDNN, the loss in chunks, the fused optimizer; on a CPU nothing is compiled.

Recomputation is a setting of both: none; selective, all of a block but attention; full, whole blocks. Each side is measured
with the first of --recompute that fits into memory, or with --all with every one, of which the fastest counts.

Every run goes on for --seconds after a warm-up, the sides in turn, --rounds times, so that both see the same clocks. Model
FLOPs are 6 N tokens + 12 pairs A D a layer: N counts the weights of matrix products, the head among them; pairs are the visible
(query, key) pairs; recomputation does not count. Energy, power and clock are the GPU's own counters (NVML), over the measured
steps alone. Memory is what was allocated: the arena's highest byte, the caching allocator's peak.

    bench/compare_torch.py --shapes qwen3-1.7b,llama-3.2-1b --lens 8192,32768 [--recompute none,selective] [--output FILE.json]
    bench/compare_torch.py --device cpu [--threads N]
    bench/compare_torch.py --sides Farspan --ranks 8 --set parallel.context_parallel_size=8 --lens 131072
"""
import argparse
import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import random
import statistics
import subprocess
import tempfile
import threading
import time


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    ffn: int
    vocab: int
    base: float

    def model_flops(self, tokens):
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.groups)
        weights = self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden
        pairs = tokens * (tokens + 1) // 2
        return 6 * weights * tokens + 12 * pairs * self.heads * self.head * self.layers


# The published sizes; Qwen3's norms of queries and keys are left out on both sides.
SHAPES = {
    "qwen3-1.7b": Shape(28, 2048, 16, 8, 128, 6144, 151936, 1e6),
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, 5e5),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, 5e5),
    "bytes-85m": Shape(12, 768, 12, 12, 64, 2048, 257, 1e4),
}
TORCH_LOSS_CHUNK = 8192
LONG_STEP = 5  # seconds of steps after which both sides are warm


# --- the GPU's own counters -------------------------------------------------------------------------------------------

class Counters:
    """Energy, power and clock of the first GPU that this process may use, None where there is no NVML."""

    def __init__(self, wanted):
        self.gpu = ctypes.c_void_p()
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1") if wanted else None
        except OSError:
            self.nvml = None
        if self.nvml and (self.nvml.nvmlInit_v2() or
                          self.nvml.nvmlDeviceGetHandleByIndex_v2(self.index(), ctypes.byref(self.gpu))):
            self.nvml = None

    @staticmethod
    def index():
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        return int(first) if first.isdigit() else 0

    def read(self, function, number, *before):
        if self.nvml is None or getattr(self.nvml, function)(self.gpu, *before, ctypes.byref(number)) != 0:
            return None
        return number.value

    def joules(self):
        millijoules = self.read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
        return None if millijoules is None else millijoules / 1e3

    def watts(self):
        milliwatts = self.read("nvmlDeviceGetPowerUsage", ctypes.c_uint())
        return None if milliwatts is None else milliwatts / 1e3

    def sm_megahertz(self):
        return self.read("nvmlDeviceGetClockInfo", ctypes.c_uint(), ctypes.c_int(1))


class Watch:
    """What the counters say from begin() to end()."""

    def __init__(self, counters):
        self.counters = counters

    def begin(self):
        self.samples, self.stop = [], threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.joules = self.counters.joules()
        self.thread.start()

    def sample(self):
        while not self.stop.wait(0.2):
            self.samples.append((self.counters.watts(), self.counters.sm_megahertz()))

    def end(self, tokens):
        joules = self.counters.joules()
        self.stop.set()
        self.thread.join()
        watts, clocks = ([value for value in column if value is not None] for column in
                         (zip(*self.samples) if self.samples else ((), ())))
        return {"joules_per_token": None if joules is None or self.joules is None else (joules - self.joules) / tokens,
                "watts": statistics.mean(watts) if watts else None,
                "sm_megahertz": statistics.mean(clocks) if clocks else None}


def enough(times, options):
    return len(times) >= options.steps and sum(times) >= options.seconds


def is_warm(times):
    return len(times) >= 3 or sum(times) >= LONG_STEP


# --- Farspan ----------------------------------------------------------------------------------------------------------

def farspan_config(shape, tokens, recompute, text, options):
    keys = {
        "model": {"num_layers": shape.layers, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn,
                  "num_attention_heads": shape.heads, "num_query_groups": shape.groups, "kv_channels": shape.head,
                  "vocab_size": shape.vocab, "rotary_base": shape.base, "untie_embeddings_and_output_weights": "false",
                  "qk_layernorm": "false"},
        "data": {"path": text, "seq_length": tokens, "split": "100"},
        "training": {"device": options.device, "precision": "bf16" if options.device == "cuda" else "fp32",
                     "train_iters": 1000000, "eval_iters": 0},
        "optimizer": {"lr": 1e-4, "lr_decay_style": "constant", "clip_grad": options.clip},
        "memory": {"recompute_granularity": recompute},
    }
    for setting in options.set:
        path, value = setting.split("=", 1)
        section, key = path.split(".", 1)
        keys.setdefault(section, {})[key] = value
    return "".join(f"{section}:\n" + "".join(f"  {key}: {value}\n" for key, value in pairs.items())
                   for section, pairs in keys.items())


def training_lines(metrics):
    """The steps that have been written whole."""
    if not metrics.exists():
        return []
    whole = metrics.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if '"kind":"train"' in line]


def run_farspan(shape, tokens, recompute, options, counters):
    """The program is killed once it has run for long enough: there is nothing to save."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "text").write_bytes(bytes(random.Random(1).choices(range(32, 127), k=4 * tokens)))
        config = farspan_config(shape, tokens, recompute, folder / "text", options)
        (folder / "bench.yaml").write_text(config)
        if options.keep:
            pathlib.Path(options.keep).write_text(config)
        watch, warm, failed = Watch(counters), None, None
        with open(folder / "out", "w") as out:
            program = subprocess.Popen([options.program, "train", folder / "bench.yaml", "--output", folder / "run",
                                        "--ranks", str(options.ranks)], stdout=out, stderr=subprocess.STDOUT)
        start = time.monotonic()
        try:
            while True:
                failed = program.poll()
                lines = training_lines(folder / "run" / "metrics.jsonl")
                times = [line["seconds"] for line in lines]
                if failed is not None:
                    break
                if warm is None and is_warm(times):
                    warm = len(times)
                    watch.begin()
                if warm is not None and enough(times[warm:], options):
                    break
                time.sleep(0.005)
        finally:
            program.kill()
            program.wait()
        if failed is not None:
            message = (folder / "out").read_text().strip().splitlines()[-1:]
            return {"failed": message[0] if message else f"status {failed}", "fits": failed != 4}
        lines = lines[warm:]

        def middle(key):
            return statistics.median(line[key] for line in lines)

        return {"seconds": middle("seconds"), "steps": len(lines), "loss": lines[-1]["loss"],
                "peak_bytes": max(lines[-1]["peak_memory_bytes"]),
                "exposed_seconds": {name: middle(f"{name}_exposed_seconds") for name in ("tp", "cp", "dp", "pp")},
                "started_seconds": time.monotonic() - start - sum(times),
                **watch.end(tokens * len(lines))}


# --- PyTorch ----------------------------------------------------------------------------------------------------------

def torch_model(shape, recompute):
    import functools

    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    attention_ops = {aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention.default,
                     aten._scaled_dot_product_flash_attention_for_cpu.default}

    def keep_attention(context, op, *arguments, **keywords):
        return CheckpointPolicy.MUST_SAVE if op in attention_ops else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, keep_attention)

    def rotate(x, cos, sin):
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.widths = (shape.heads * shape.head, shape.groups * shape.head, shape.groups * shape.head)
            self.norm1, self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5), nn.RMSNorm(shape.hidden, eps=1e-5)
            self.qkv = nn.Linear(shape.hidden, sum(self.widths), bias=False)
            self.out = nn.Linear(self.widths[0], shape.hidden, bias=False)
            self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
            self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

        def heads(self, x):
            return x.unflatten(-1, (-1, shape.head)).transpose(1, 2)

        def body(self, x, cos, sin):
            q, k, v = map(self.heads, self.qkv(self.norm1(x)).split(self.widths, -1))
            o = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True,
                                               enable_gqa=shape.heads != shape.groups)
            x = x + self.out(o.transpose(1, 2).flatten(2))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

        def forward(self, x, cos, sin):
            if recompute == "none":
                return self.body(x, cos, sin)
            if recompute == "full":
                return checkpoint(self.body, x, cos, sin, use_reentrant=False)
            return checkpoint(self.body, x, cos, sin, use_reentrant=False, context_fn=contexts)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(shape.vocab, shape.hidden)
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)

    return Model


class TorchSide:
    """Builds the step anew for every run and lets go of all memory after it; what was compiled stays."""

    def __init__(self, options):
        import torch
        self.torch, self.options = torch, options
        self.models = {}
        self.compiled_for = None
        self.on_gpu = options.device == "cuda"
        if not self.on_gpu:
            torch.set_num_threads(options.threads)

    def model(self, shape, recompute):
        key = (shape, recompute)
        if key not in self.models:
            self.models[key] = torch_model(shape, recompute)
        with self.torch.device(self.options.device):
            return self.models[key]()

    def step_of(self, shape, tokens, recompute):
        import torch
        import torch.nn.functional as F
        from torch.utils.checkpoint import checkpoint

        torch.manual_seed(0)
        device, dtype = self.options.device, torch.bfloat16 if self.on_gpu else torch.float32
        model = self.model(shape, recompute)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        channel = torch.arange(0, shape.head, 2, device=device) / shape.head
        angle = torch.arange(tokens, device=device).float()[:, None] / (shape.base ** channel)[None]
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        inputs = torch.randint(shape.vocab, (1, tokens), device=device)
        labels = torch.randint(shape.vocab, (tokens,), device=device)

        def chunk_loss(hidden, weight, targets):
            return F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")

        if self.on_gpu:
            for part in [*model.blocks, model.norm]:
                part.compile()
            chunk_loss = torch.compile(chunk_loss)

        def step():
            with torch.autocast(device, dtype, enabled=self.on_gpu):
                hidden = model.embedding(inputs).to(dtype)
                for block in model.blocks:
                    hidden = block(hidden, cos, sin)
                hidden, weight = model.norm(hidden)[0], model.embedding.weight.to(dtype)
                loss = 0.0
                for part, targets in zip(hidden.split(TORCH_LOSS_CHUNK), labels.split(TORCH_LOSS_CHUNK)):
                    loss = loss + checkpoint(chunk_loss, part, weight, targets, use_reentrant=False)
                loss = loss / tokens
            loss.backward()
            if self.options.clip > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.options.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.item()  # waits for the device

        return step

    def run(self, shape, tokens, recompute, counters):
        # What was compiled for one length makes the compiler leave the length open in the next, which is slower.
        if self.compiled_for != (shape, tokens):
            self.torch._dynamo.reset()
            self.compiled_for = (shape, tokens)
        from torch.nn.attention import SDPBackend, sdpa_kernel
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        try:
            with sdpa_kernel(backends, set_priority=True):
                return self.measure(shape, tokens, recompute, counters)
        except self.torch.OutOfMemoryError:
            return {"failed": "out of memory", "fits": False}
        finally:
            gc.collect()
            if self.on_gpu:
                self.torch.cuda.empty_cache()

    def measure(self, shape, tokens, recompute, counters):
        start = time.monotonic()
        step = self.step_of(shape, tokens, recompute)
        step()  # compiles
        started = time.monotonic() - start

        def timed():
            begin = time.perf_counter()
            loss = step()
            return time.perf_counter() - begin, loss

        times = []
        while not is_warm(times):
            times.append(timed()[0])
        if self.on_gpu:
            self.torch.cuda.reset_peak_memory_stats()
        watch, times = Watch(counters), []
        watch.begin()
        while not enough(times, self.options):
            seconds, loss = timed()
            times.append(seconds)
        return {"seconds": statistics.median(times), "steps": len(times), "started_seconds": started, "loss": loss,
                "peak_bytes": self.torch.cuda.max_memory_allocated() if self.on_gpu else None,
                "reserved_bytes": self.torch.cuda.max_memory_reserved() if self.on_gpu else None,
                **watch.end(tokens * len(times))}


# --- the comparison ---------------------------------------------------------------------------------------------------

def text_of(run):
    if "failed" in run:
        return f"{run['who']:8} {run['recompute']:9} {run['failed'][:160]}"

    def value(key, form, scale=1):
        return "-" if run.get(key) is None else form.format(run[key] / scale)

    return (f"{run['who']:8} {run['recompute']:9} {run['seconds']:9.4f} s a step  {run['tflops']:7.4g} TFLOP/s  "
            f"{value('peak_bytes', '{:6.2f}', 2**30)} GiB  {value('joules_per_token', '{:8.5f}')} J/token  "
            f"{value('sm_megahertz', '{:5.0f}')} MHz  {value('watts', '{:4.0f}')} W  ({run['steps']} steps, "
            f"{run['started_seconds']:.0f} s to the first)")


def compare(name, tokens, options, sides, record):
    shape = SHAPES[name]
    print(f"\n{name}, {tokens} tokens", flush=True)
    best = {}
    for number in range(options.rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for who in order:
            settings = [best[who]["recompute"]] if who in best else options.recompute if number == 0 else []
            for recompute in settings:
                run = {"shape": name, "tokens": tokens, "round": number + 1, "who": who, "recompute": recompute,
                       **sides[who](shape, tokens, recompute)}
                if "seconds" in run:
                    run["tflops"] = shape.model_flops(tokens) / run["seconds"] / 1e12
                print(text_of(run), flush=True)
                record(run)
                if "seconds" not in run:
                    continue
                if who not in best or run["seconds"] < best[who]["seconds"] or number > 0:
                    best[who] = run
                if not options.all:
                    break


def ratio_of(runs, name, tokens):
    def seconds(who):
        of_who = [run for run in runs if (run["shape"], run["tokens"], run["who"]) == (name, tokens, who)]
        by_setting = {}
        for run in of_who:
            if "seconds" in run:
                by_setting.setdefault(run["recompute"], []).append(run["seconds"])
        return min((statistics.median(times) for times in by_setting.values()), default=None)

    ours, theirs = seconds("Farspan"), seconds("PyTorch")
    return None if ours is None or theirs is None else theirs / ours


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comma = lambda text: text.split(",")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", type=comma, help=", ".join(SHAPES))
    parser.add_argument("--lens", type=lambda text: [int(part) for part in text.split(",")], help="tokens of the row")
    parser.add_argument("--recompute", type=comma, help="settings to try, in this order")
    parser.add_argument("--all", action="store_true", help="measure every setting that fits")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10, help="of measured steps in each run, at least")
    parser.add_argument("--steps", type=int, default=2, help="measured in each run, at least")
    parser.add_argument("--clip", type=float, default=0, help="clip the gradient norm; 0: not")
    parser.add_argument("--sides", type=comma, default=["PyTorch", "Farspan"], help="which to run, and in which order")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a key of Farspan's")
    parser.add_argument("--ranks", type=int, default=1, help="of Farspan; counters are GPU 0's")
    parser.add_argument("--program", default="build/release/farspan")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of a CPU")
    parser.add_argument("--keep", metavar="FILE", help="where to leave Farspan's last configuration")
    parser.add_argument("--output", help="every run as JSON, written after each")
    options = parser.parse_args()
    if options.ranks > 1 and "PyTorch" in options.sides:
        parser.error("PyTorch runs on one device; with --ranks give --sides Farspan")
    on_gpu = options.device == "cuda"
    options.shapes = options.shapes or (["qwen3-1.7b", "llama-3.2-1b"] if on_gpu else ["bytes-85m"])
    options.lens = options.lens or ([8192, 32768, 131072] if on_gpu else [2048])
    options.recompute = options.recompute or (["none", "selective", "full"] if on_gpu else ["none"])
    for name in options.shapes:
        if name not in SHAPES:
            parser.error(f"unknown shape {name}; known are {', '.join(SHAPES)}")
    return options


def main():
    options = parse()
    if options.device == "cpu":
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:options.threads]))
    counters = Counters(options.device == "cuda")
    runs = []

    def record(run):
        runs.append(run)
        if options.output:
            pathlib.Path(options.output).write_text(json.dumps(runs, indent=1) + "\n")

    torch_side = TorchSide(options) if "PyTorch" in options.sides else None
    sides = {"PyTorch": lambda *what: torch_side.run(*what, counters),
             "Farspan": lambda *what: run_farspan(*what, options, counters)}
    sides = {who: sides[who] for who in options.sides}
    ratios = {}
    for name in options.shapes:
        for tokens in options.lens:
            compare(name, tokens, options, sides, record)
            ratios[name, tokens] = ratio_of(runs, name, tokens)
            if ratios[name, tokens] is not None:
                print(f"PyTorch / Farspan {ratios[name, tokens]:.3f} (above 1: Farspan is faster)", flush=True)
    print("\nshape            tokens  PyTorch / Farspan")
    for (name, tokens), ratio in ratios.items():
        print(f"{name:14} {tokens:8}  {'-' if ratio is None else f'{ratio:.3f}'}")


if __name__ == "__main__":
    main()
