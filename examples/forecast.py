"""A real series forecast one step ahead: the delta rule as an adaptive filter that forgets.

The state holds the weights of a linear filter. Its input is the window of the last values and a
constant 1; the delta rule moves the weights along the window by beta times the error of its
forecast (with keys of unit length this is normalised least mean squares), and the gate lets old
weights fade. The rule writes before it reads, so token t stores value t under the window before it,
and its query is the window that ends with t: y[t] forecasts value t + 1 from values up to t.

Every pair of gate and beta is a head of one call. The pair with the least error in the first half
of the series is used, and all errors are of the second half: the delta rule's, those of persistence
(the next value is the last one), and those of a filter of the same length fitted to the first half
by least squares and then kept. RMSE is the root of the mean squared error, MAE the mean absolute
error; both in the unit of the series.
"""

import argparse
import itertools
import pathlib

import numpy as np
from rich.console import Console
from rich.table import Table

from cupy_gdelta import gated_delta_rule

SERIES = {  # file, unit, window
    "sunspots": ("sunspots.csv", "sunspots", 11),  # yearly; a solar cycle takes about 11 years
    "elnino": ("elnino.csv", "degrees Celsius", 12),  # monthly
}
GATES = (1.0, 0.999, 0.995, 0.99, 0.98, 0.95)
BETAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


def windows(z, lags):
    """Row i holds z[i : i + lags] and a constant 1."""
    w = np.lib.stride_tricks.sliding_window_view(z, lags)
    return np.concatenate([w, np.ones((len(w), 1))], axis=1)


def adaptive(z, lags, settings):
    """Forecasts of z[lags + 1:], one column for each (gate, beta) of ``settings``."""
    w = windows(z, lags)
    length = np.linalg.norm(w, axis=1)
    T, H = len(z) - lags, len(settings)
    k = (w / length[:, None])[:-1]  # before value t, of unit length
    v = z[lags:] / length[:-1]  # scaled as the key was, so that a filter of z fits
    q = w[1:]  # up to value t
    gate, beta = (np.broadcast_to(x, (1, T, H)).copy() for x in np.transpose(settings))
    v = np.broadcast_to(v[None, :, None, None], (1, T, H, 1))
    y = gated_delta_rule(
        q[None, :, None], k[None, :, None], v, gate, beta
    )  # q, k: one head for all
    return y[0, :-1, :, 0]  # the last one would be of a value not measured yet


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--series", choices=SERIES, default="sunspots")
    parser.add_argument("--lags", type=int, help="values in the window (default 11 or 12)")
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw the forecasts")
    options = parser.parse_args(argv)
    file, unit, lags = SERIES[options.series]
    lags = lags if options.lags is None else options.lags
    path = pathlib.Path(__file__).with_name(file)
    when, x = np.loadtxt(path, delimiter=",", skiprows=1, unpack=True)
    half = len(x) // 2
    if not 1 <= lags <= half // 2:
        parser.error(f"--lags must be from 1 to {half // 2}")
    if options.plot:
        import matplotlib  # noqa: F401 (before the work, should it be missing)

        if options.plot.is_dir() or not options.plot.parent.is_dir():
            parser.error(f"{options.plot} cannot be written")

    mean, spread = x[:half].mean(), x[:half].std()  # of the first half: the second is not known yet
    z = (x - mean) / spread
    settings = list(itertools.product(GATES, BETAS))
    first = np.arange(lags + 1, len(x)) < half  # which of the values forecast are in the first half
    actual = x[lags + 1 :]
    candidates = mean + spread * adaptive(z, lags, settings)
    best = np.square(candidates - actual[:, None])[first].mean(axis=0).argmin()
    w = windows(z, lags)[1:-1]
    weights = np.linalg.lstsq(w[first], z[lags + 1 :][first], rcond=None)[0]
    forecasts = {
        "delta rule": candidates[:, best],
        "persistence": x[lags:-1],
        "least squares": mean + spread * (w @ weights),
    }
    errors = {name: (f - actual)[~first] for name, f in forecasts.items()}

    gate, beta = settings[best]
    table = Table("")
    table.add_column(f"RMSE ({unit})", justify="right")
    table.add_column(f"MAE ({unit})", justify="right")
    for name, e in errors.items():
        table.add_row(name, f"{np.sqrt(np.mean(e**2)):.3g}", f"{np.mean(np.abs(e)):.3g}")
    console = Console(highlight=False)
    console.print(
        f"{options.series}: {(~first).sum()} values, each forecast from the {lags} before it"
    )
    console.print(table)
    console.print(f"delta rule: gate {gate:g} and beta {beta:g}, the best in the first half")
    if options.plot:
        second = {name: f[~first] for name, f in forecasts.items()}
        draw(when[lags + 1 :][~first], actual[~first], second, unit, options.plot)
    return 0


def draw(when, actual, forecasts, unit, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    upper.plot(when, actual, color="0.2", linewidth=1.2, label="measured")
    upper.plot(
        when, forecasts["delta rule"], color="C1", linewidth=1.2, label="delta rule, a step ahead"
    )
    upper.set_ylabel(unit)
    upper.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    upper.margins(x=0.01)
    for name, color in (("persistence", "0.7"), ("least squares", "C0"), ("delta rule", "C1")):
        lower.plot(when, np.abs(forecasts[name] - actual), color=color, linewidth=1, label=name)
    lower.set_ylabel(f"absolute error\n({unit})")
    lower.set_xlabel("year")
    lower.set_ylim(bottom=0)
    lower.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
