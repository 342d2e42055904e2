"""Mains hum taken out of a voice, sample by sample, by the delta rule as an adaptive filter.

The state holds one weight for the cosine and one for the sine of each harmonic of the mains: a
filter whose reference is the mains itself. Each sample is one step: the key is the reference now,
of unit length, the value what the microphone has measured, and the delta rule moves the weights
along the key by beta times the error of its forecast. The query is the reference one sample ahead,
so y forecasts the hum in the next sample, and what the microphone then measures beyond it is the
voice. This is the adaptive noise canceller of Widrow et al. (1975), in memory that does not grow.

The voice is a recording; the hum is made here and added: eight harmonics of 50 Hz whose frequency
and strength drift, as those of the mains do. "SNR" is the power of the voice over that of what was
added and is left, in dB, from half a second on, when the weights have settled. Least squares fits
the same harmonics to the whole recording at once, with weights that cannot follow.
"""

import argparse
import pathlib
import time
import wave

import numpy as np
from rich.console import Console
from rich.table import Table

from cupy_gdelta import gated_delta_rule_step

MAINS, HARMONICS = 50.0, 8  # hertz
SETTLED = 0.5  # seconds


def read(path):
    """Samples from -1 to 1, and how many a second."""
    with wave.open(str(path)) as file:
        x = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return x.astype(np.float32) / 2**15, file.getframerate()


def write(path, x, rate):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((2**15 * np.clip(x, -1, 1 - 2**-15)).astype("<i2").tobytes())


def hum(count, rate, power):
    """Harmonics that drift: by a twentieth of a hertz, and by a third of their strength."""
    t = np.arange(count) / rate
    mains = MAINS + 0.05 * np.sin(2 * np.pi * t / 4)
    phase = 2 * np.pi * np.cumsum(mains) / rate
    strength = 1 + np.sin(2 * np.pi * t / 3) / 3
    x = strength * sum(np.cos(n * phase + n * n) / n for n in range(1, HARMONICS + 1))
    return (x * np.sqrt(power / np.mean(x**2))).astype(np.float32)


def reference(count, rate):
    """Cosines and sines of the nominal harmonics [count, K], rows of unit length."""
    angle = 2 * np.pi * MAINS / rate * np.outer(np.arange(count), np.arange(1, HARMONICS + 1))
    waves = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    return (waves / np.sqrt(HARMONICS)).astype(np.float32)


def cancel(x, keys, beta, block):
    """x without what its next sample could be told to hold; ``block`` samples a call."""
    state = np.zeros((1, 1, keys.shape[1], 1), np.float32)  # [B, H, K, V]: all the memory there is
    clean, forecast = np.empty_like(x), np.zeros(1, np.float32)
    betas = np.full((1, block, 1), beta, np.float32)
    for i in range(0, len(x), block):
        new = x[i : i + block]  # as they come from the microphone
        n = len(new)
        k = keys[None, i : i + n, None]  # [B, T, H, K]
        q = keys[None, i + 1 : i + n + 1, None]
        y = gated_delta_rule_step(q, k, new[None, :, None, None], None, betas[:, :n], state)
        hums = np.concatenate([forecast, y.ravel()])  # of these samples, and of the next one
        clean[i : i + n] = new - hums[:n]
        forecast = hums[n:]
    return clean


def decibels(voice, left):
    return 10 * np.log10(np.sum(voice**2) / np.sum(left**2))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="of the recording, at most")
    parser.add_argument("--beta", type=float, default=0.01, help="step of the filter, 0 to 1")
    parser.add_argument("--block", type=int, default=1, help="samples a call, up to 16 (default 1)")
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw both spectra")
    parser.add_argument(
        "--wav",
        metavar="FILE.wav",
        type=pathlib.Path,
        help="write the voice with hum, then without",
    )
    options = parser.parse_args(argv)
    if not 1 <= options.block <= 16:
        parser.error("--block must be from 1 to 16")
    if not 0 < options.beta < 1:
        parser.error("--beta must be between 0 and 1")
    if not options.seconds > 2 * SETTLED:
        parser.error(f"--seconds must be more than {2 * SETTLED:g}")
    for path in (options.plot, options.wav):
        if path and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"{path} cannot be written")
    if options.plot:
        import matplotlib  # noqa: F401 (before the work, should it be missing)

    voice, rate = read(pathlib.Path(__file__).with_name("voice.wav"))
    voice = voice[: int(options.seconds * rate)]
    x = voice + hum(len(voice), rate, np.mean(voice**2))
    keys = reference(len(x) + 1, rate)

    begin = time.perf_counter()
    clean = cancel(x, keys, options.beta, options.block)
    took = time.perf_counter() - begin

    fixed = x - keys[:-1] @ np.linalg.lstsq(keys[:-1], x, rcond=None)[0]
    late = slice(int(SETTLED * rate), None)
    table = Table("")
    table.add_column("SNR (dB)", justify="right")
    for name, y in (("with hum", x), ("least squares", fixed), ("delta rule", clean)):
        table.add_row(name, f"{decibels(voice[late], (y - voice)[late]):.1f}")
    seconds = len(x) / rate
    console = Console(highlight=False)
    console.print(
        f"{seconds:.1f} s of voice at {rate} samples a second, hum in {HARMONICS} harmonics of "
        f"{MAINS:g} Hz"
    )
    console.print(table)
    console.print(
        f"real-time factor {took / seconds:.2f}: {1e6 * took / len(x):.0f} us a sample, "
        f"{options.block} a call, in a state of {keys.shape[1]} numbers"
    )
    if options.wav:
        pause = np.zeros(rate // 2, np.float32)
        write(options.wav, np.concatenate([x, pause, clean]), rate)
    if options.plot:
        draw(x, clean, rate, options.plot)
    return 0


def draw(x, clean, rate, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(1, 2))
    for (upper, lower), y, title in zip(
        axes.T, (x, clean), ("with hum", "without, by the delta rule"), strict=True
    ):
        upper.plot(np.arange(len(y)) / rate, y, color="0.3", linewidth=0.4)
        upper.set_title(title)
        *_, image = lower.specgram(y + 1e-6, NFFT=512, Fs=rate, noverlap=384, vmin=-110, vmax=-40)
        lower.set_ylim(0, 1500)
        lower.set_xlabel("seconds")
    axes[0, 0].set_ylabel("samples")
    axes[1, 0].set_ylabel("hertz")
    figure.colorbar(image, ax=axes[1], label="dB")
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
