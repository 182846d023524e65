#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One training step in Farspan and in PyTorch, on the same CPU cores, in turn, and their ratio.

The model is the same in both: 12 layers of 768, 12 heads of 64, SwiGLU 2048, byte vocabulary, one row of 2048 tokens, tied
head, AdamW, gradient norm clipped, nothing recomputed. PyTorch runs it as its users would: scaled_dot_product_attention,
fused AdamW, fp32.

    bench/compare_torch.py [--program build/release/farspan] [--threads N] [--rounds 3] [--steps 4]
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import tempfile
import time

LAYERS, HIDDEN, HEADS, HEAD, FFN, VOCAB, TOKENS = 12, 768, 12, 64, 2048, 257, 2048


def farspan_seconds(program, threads, steps, folder):
    """Seconds of each step but the first two."""
    text = pathlib.Path(folder) / "text"
    random.seed(1)
    text.write_bytes(bytes(random.randrange(256) for _ in range(TOKENS * 8)))
    flags = {"num-layers": LAYERS, "hidden-size": HIDDEN, "num-attention-heads": HEADS, "ffn-hidden-size": FFN,
             "seq-length": TOKENS, "train-iters": steps + 2, "eval-iters": 0, "recompute-granularity": "none",
             "path": text, "output": pathlib.Path(folder) / "run"}
    config = pathlib.Path(folder) / "bench.yaml"
    config.write_text("training:\n  precision: fp32\n")
    command = ["taskset", "-c", ",".join(map(str, range(threads))), program, "train", config]
    for key, value in flags.items():
        command += [f"--{key}", str(value)]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    lines = (pathlib.Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines if '"train"' in line][2:]


def torch_step(threads):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(0)

    def rope(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
            self.qkv = nn.Linear(HIDDEN, 3 * HEADS * HEAD, bias=False)
            self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
            self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
            self.down = nn.Linear(FFN, HIDDEN, bias=False)

        def forward(self, x, cos, sin):
            q, k, v = (t.view(1, TOKENS, HEADS, HEAD).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
            o = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
            x = x + self.out(o.transpose(1, 2).reshape(1, TOKENS, -1))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCAB, HIDDEN)
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)

        def forward(self, tokens, labels, cos, sin):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, cos, sin)
            return F.cross_entropy((self.norm(x) @ self.embedding.weight.t()).view(TOKENS, VOCAB), labels)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    angle = torch.arange(TOKENS)[:, None] / (10000.0 ** (torch.arange(0, HEAD, 2) / HEAD))[None]
    cos, sin = angle.cos(), angle.sin()
    tokens = torch.randint(256, (1, TOKENS))
    labels = torch.randint(256, (TOKENS,))

    def step():
        loss = model(tokens, labels, cos, sin)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return torch.__version__, step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="build/release/farspan")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, set(range(arguments.threads)))
    version, step = torch_step(arguments.threads)
    for _ in range(2):
        step()
    ratios = []
    for round_number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            ours = statistics.median(farspan_seconds(arguments.program, arguments.threads, arguments.steps, folder))
        times = []
        for _ in range(arguments.steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        theirs = statistics.median(times)
        ratios.append(theirs / ours)
        print(f"round {round_number + 1}: Farspan {ours:.3f} s, PyTorch {version} {theirs:.3f} s a step, "
              f"{arguments.threads} threads; PyTorch / Farspan {theirs / ours:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (above 1: Farspan is faster)")


if __name__ == "__main__":
    main()
