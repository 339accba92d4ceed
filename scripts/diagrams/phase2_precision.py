"""Diagrams of phase 2: fewer bits, and fewer activations."""

from __future__ import annotations

from solutions.phase2_advanced.loss_scaling import LossScaler

from .letters import SMALL
from .plots import axes
from .registry import diagram
from .shapes import Cell, circuit, flow, row
from .sheet import INNER, MARGIN, Sheet


@diagram("2.5", "Multiply in 16 bits, add up in 32")
def mixed(sheet: Sheet) -> None:
    circuit(
        sheet,
        ("float32: masters, optimizer, sums", "16 bits: products of matrices"),
        ["masters", "step: master\n-= lr · …", "sum over micro-\nbatches, ranks"],
        ["weights", "forward", "backward:\ngradients"],
        "round",
        "add up",
        tones=("blue", "orange"),
    )
    sheet.gap(4)
    sheet.note("Inside forward", bold=True)
    parts = [("x·θ", 16), ("norm", 32), ("x·θ", 16), ("logits", 32), ("loss", 32)]
    cells = [
        Cell(
            f"{name}\n{'16 bits' if bits == 16 else 'float32'}", "orange" if bits == 16 else "blue"
        )
        for name, bits in parts
    ]
    flow(sheet, cells)
    sheet.note(
        "Sums of many numbers, in norms, softmax and loss, are taken in float32, so that small "
        "terms are not lost."
    )


@diagram("2.6", "Overflow: skip and halve; a quiet while: double")
def scaling(sheet: Sheet) -> None:
    interval, most = 6, 40000.0
    scaler = LossScaler(growth_interval=interval)
    used, good = [], []
    for _ in range(20):
        used.append(scaler.scale)
        scaler.finite = scaler.scale < most
        good.append(scaler.finite)
        scaler.update()
    plot = axes(sheet, (0, len(used)), (2**14, 2**17), height=120, left=60, right=10, log_y=True)
    plot.frame(
        {0: "0", 10: "10", 20: "20"}, {2.0**n: f"{2**n}" for n in (15, 16)}, "step", "scale S"
    )
    points = [(t + d, s) for t, s in enumerate(used) for d in (0, 1)]
    plot.line(points, "blue")
    for t, (scale, fine) in enumerate(zip(used, good, strict=True)):
        x, y = plot.at(t + 0.1, scale)
        if fine:
            sheet.circle(x + 9, y - 12, 2.5, "green")
        else:
            sheet.text(x, y - 14, "skip", size=SMALL, tone="red")
    sheet.note(
        f"A dot is a step without overflow. Here {interval} of them in a row double S; usual are "
        "2000."
    )
    words = [
        "loss · S,\nbackward",
        "reduce",
        "÷ S,\nall finite?",
        "clip",
        "step on all\nor on none",
        "update S",
    ]
    tones = ["grey", "orange", "blue", "grey", "green", "blue"]
    flow(sheet, [Cell(word, tone) for word, tone in zip(words, tones, strict=True)], apart=14)
    sheet.note('The ranks agree on "all finite?" by one number, MAX over the ranks.')


@diagram("2.7", "Keep few activations, compute the others again")
def checkpointing(sheet: Sheet) -> None:
    layers, segments, each = 12, 3, 4
    size = layers // segments
    x, w = MARGIN + 116, (INNER - 116) / layers
    inputs = [Cell(f"x{k}", "purple", True) if k % size == 0 else None for k in range(layers)]
    last = [Cell(str(k + 1), "blue") if k >= layers - size else None for k in range(layers)]
    row(sheet, "forward", [Cell(str(k + 1), "grey") for k in range(layers)], x=x, w=w)
    row(sheet, "inputs held", inputs, x=x, w=w)
    row(sheet, "layers held", last, x=x, w=w, below=12)
    for segment in range(segments - 1, -1, -1):
        first = segment * size
        cells: list[Cell | None] = [None] * first
        cells += [Cell(str(first + k + 1), "blue") for k in range(size)]
        words = "backward" if segment == segments - 1 else "again, backward"
        row(sheet, words, cells, x=x, w=w)
    kept, plain, now = [0.0], [0.0], 0.0
    for k in range(layers):
        plain.append(plain[-1] + each)
        if k % size == 0 and k < layers - size:
            now += 1
        kept.append(now + each * max(0, k + 1 - (layers - size)))
    for segment in range(segments - 1, -1, -1):
        count = segments - 1 if segment == segments - 1 else segment + 1
        if segment < segments - 1:
            kept += [count + each * (k + 1) for k in range(size)]
        kept += [
            min(count, segment if k == size - 1 else count) + each * (size - 1 - k)
            for k in range(size)
        ]
    plain += [each * (layers - 1 - k) for k in range(layers)]
    plot = axes(sheet, (0, len(kept) - 1), (0, 52), height=110, left=50, right=60)
    plot.frame(
        {layers: "backward begins"},
        {0: "0", each * layers: f"{each * layers} A"},
        "time",
        "activations held",
    )
    plot.line(list(enumerate(plain)), "red", dashed=True)
    plot.line(list(enumerate(kept)), "green")
    plot.word(15, 38, f"all held: {max(plain):g} A", "red")
    plot.word(19, 25, f"{segments} segments: {max(kept):g} A", "green")
    sheet.note(
        f"{layers - size} layers are computed twice. x: inputs of segments, A each; a layer's "
        f"activations take {each} A. The formula: (s-1)·A + ⌈n/s⌉·L."
    )
