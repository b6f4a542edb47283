# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tutorial: from a job to reports one can rely on
#
# This builds a mechanism for Midtown Manhattan that hides a block, checks its proof, samples from it,
# measures what it costs and what it hides, and chooses ε. It takes less than half a minute, as a script
# (`python workflows/tutorial.py`) or as a notebook (`jupytext --to notebook workflows/tutorial.py`), and
# writes into a folder `tutorial`. All that it needs is shipped: `pip install 'mdpext-dask[report]'`.

# %%
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from mdpext_dask import (
    BoundRequest,
    JobSpec,
    ReleaseBudget,
    StickyKey,
    audit,
    build,
    evaluate,
    open_mechanism,
    report,
)
from mdpext_dask.errors import BudgetExceeded
from mdpext_dask.reports import plots
from mdpext_dask.runtime import open_city
from mdpext_dask.sampling.export import export_city

folder = Path("tutorial")
folder.mkdir(exist_ok=True)

# %% [markdown]
# ## A job
#
# The sections and keys are those of a job file. Here the road network is the one that is shipped, cut to a
# box; `cell_km` is the side of a source cell, and each is refined 4 × 4: its vertices are the records, the
# places that are told apart, 90 m from each other. A report is one of the *outputs*: road nodes, as many as
# are of use. ε = 5 per km: places 200 m apart may differ in the probability of any report by a factor of e.
#
# The method is planar noise, each place of it sent to the output that is best for whoever may be there. (Left
# out, seed programs are tried as well where the plan allows them a minute, and what loses less is kept.)
#
# A key that is misspelt, or a value that cannot be, is one line of error. `"inline"` runs all tasks in this
# process; left out, there are two processes, and in a script the calls then belong under `if __name__ ==
# "__main__":`.

# %%
spec = JobSpec.of(
    job={"name": "tutorial"},
    domain={
        "roads": "builtin:manhattan",
        "bbox": [-73.995, 40.750, -73.976, 40.765],
        "cell_km": 0.36,
        "refine": [4],
    },
    privacy={"epsilon_per_km": 5.0},
    prior={"kind": "file", "file": "builtin:manhattan-trips"},
    loss={"kind": "travel", "tasks": 20},
    extension={"method": "noise"},
    cluster={"kind": "inline"},
)

# %% [markdown]
# ## Build
#
# `build` chooses the noise and what it is sent to, writes the rows of all records, proves the promise from
# the bytes that were written, and only then marks the store as complete. Interrupted, it goes on where it
# stopped when it is called again; once the store is complete, it returns at once. `observer=PlainLines()`
# tells of progress.

# %%
store = folder / "manhattan.zarr"
summary = build(spec, store)
{key: summary[key] for key in ("records", "outputs", "epsilon_certified", "loss_km", "plain_in_words")}

# %%
mechanism = open_mechanism(store, verify=True)
mechanism

# %%
_ = plots.plot_domain(mechanism)

# %% [markdown]
# ## The certificate
#
# `audit` reads the stored bytes again and computes the smallest ε for which *all* pairs of records keep the
# promise. It is a proof: rounding is outward, no pair is left out.

# %%
certificate = audit(store)
assert certificate.holds
certificate

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
plots.plot_certificate(certificate, axes[0])
_ = plots.plot_ratios(certificate, axes[1], pairs=5_000)

# %% [markdown]
# With few records every triple (x, x', y) can be looked at as well: the certificate is never below what is
# found there.

# %%
every = audit(store, "exhaustive")
print(f"certified {certificate.epsilon:.4f}; {every.triples_checked:,} triples {every.epsilon:.4f} per km")
assert every.epsilon <= certificate.epsilon

# %% [markdown]
# Auditors take anybody's mechanism. Here is ours with probabilities rounded to three digits, as someone
# might publish them: reports that are impossible from one place and possible from another break any ε.

# %%
dataset = mechanism.dataset
rows = dataset.probability.values.reshape(-1, dataset.sizes["output"])
records = np.stack(np.meshgrid(dataset.x, dataset.y, indexing="ij"), axis=-1).reshape(-1, 2)
rounded = audit(rows.round(3), points=records, epsilon_per_km=5.0)
assert not rounded.holds
rounded

# %% [markdown]
# ## What one person reports
#
# A row M(·|x) is a distribution over the outputs; `plot_output` shows the other direction, M(y|·): from
# where one report may come.

# %%
lon, lat = -73.9855, 40.7580  # Times Square
row = mechanism.row(lon=lon, lat=lat)
likeliest = int(row.values.argmax())
figure, axes = plt.subplots(1, 2, figsize=(9, 6), layout="constrained")
plots.plot_row(mechanism, lon=lon, lat=lat, ax=axes[0])
_ = plots.plot_output(mechanism, likeliest, axes[1])

# %% [markdown]
# The promise in numbers, for two records that are neighbours: no report is more than e^{ε d} times as
# likely from one of them as from the other.

# %%
here = mechanism.row(x_km=0.0, y_km=0.0)
there = mechanism.row(x_km=0.09, y_km=0.0)
apart = abs(float(here.x - there.x))
worst = float(np.abs(np.log(here.values / there.values)).max())
allowed = 5.0 * apart
print(f"{1000 * apart:.0f} m apart: {math.exp(worst):.3f} times as likely, {math.exp(allowed):.3f} allowed")
assert worst <= allowed

# %% [markdown]
# ## Sample
#
# One report:

# %%
mechanism.sample(lon=lon, lat=lat)

# %% [markdown]
# A batch, one report for each place. What is outside the grid is reported from its border.

# %%
places = np.array([[-73.9855, 40.7580], [-73.9680, 40.7850], [-74.0094, 40.7060]])
outputs, was_outside = mechanism.sample_points(places)
mechanism.output_lonlat[outputs]

# %% [markdown]
# **Every draw is a release of its own.** 500 fresh draws for one place are 500 ε: their frequencies are
# close to the row of the true record, and no other record has that row.

# %%
seen = mechanism.sample(lon=lon, lat=lat, n=500)
counts = (seen[:, None] == mechanism.output_lonlat).all(axis=2).sum(axis=0)
guess = records[np.argmax(np.log(rows) @ counts)]
print(f"guessed from 500 draws: {math.hypot(guess[0] - float(row.x), guess[1] - float(row.y)):.2f} km off")

# %% [markdown]
# Two ways out. A *sticky* answer is drawn once for each user and record, by a secret key, and then
# repeated. And a *ledger* counts releases and refuses what would exceed the limit, before anything is
# drawn.

# %%
key = StickyKey.generate()
answers = [mechanism.sample(lon=lon, lat=lat, user="ada", sticky=key) for _ in range(5)]
assert all((answer == answers[0]).all() for answer in answers)

ledger_file = folder / "releases.sqlite"
ledger_file.unlink(missing_ok=True)
ledger = ReleaseBudget(ledger_file, limit=2)
for _attempt in range(3):
    try:
        mechanism.sample(lon=lon, lat=lat, user="ada", budget=ledger)
        print(f"reported; so far ε = {ledger.composed_epsilon('ada'):g} per km for one place")
    except BudgetExceeded as refused:
        print(f"refused: {refused}")

# %% [markdown]
# ## What it costs
#
# The expected loss is the error in road distance to the places that people travel to, here 20 of them. The
# lower bound is certified: no mechanism with the same promise and the same outputs can lose less.

# %%
facts = evaluate(store, bound=BoundRequest(seconds=3))
print(
    f"expected loss {1000 * facts['loss_km']:.0f} m; for half of the people at most "
    f"{1000 * facts['loss_quantiles_km']['0.5']:.0f} m; no mechanism below "
    f"{1000 * facts['lower_bound_km']:.0f} m; {facts['plain_in_words']}"
)

# %%
_ = plots.plot_loss(mechanism)

# %% [markdown]
# ## What attackers learn
#
# The promise holds against everybody. How well somebody guesses who knows the prior and the mechanism is
# another question, with an answer for this prior only: how far off the best guess is on average, before and
# after one report, and after more of them.

# %%
adversary = facts["adversary"]
print(f"best guess without a report: {adversary['prior_inference_error_km']:.2f} km off")
for point in adversary["releases"]["curve"]:
    if point["releases"] in (1, 10, 100):
        print(f"after {point['releases']:3} fresh reports: {point['inference_error_km']:.2f} km off")
kept = adversary["releases"]["sticky"]["inference_error_km"]
print(f"after any number of sticky ones from one place: {kept:.2f} km off")

# %% [markdown]
# ## A report to show, a file to ship
#
# `report` puts all of this into one HTML file that needs nothing else, for people who do not run Python.

# %%
told = report(store, folder / "report.html", bound_seconds=0, overwrite=True)
print(told["verdict"], f"({Path(told['file']).stat().st_size // 1000} kB)")

# %% [markdown]
# `mdpext export` packs the mechanism into one file for apps and servers, from which NumPy alone samples:
# the same certified probabilities, to the last bit.

# %%
city_file = folder / "manhattan.mdp"
packed = export_city(str(store), city_file, overwrite=True)
print(f"{city_file.stat().st_size // 1000} kB")
open_city(city_file).sample(lon, lat)

# %% [markdown]
# ## Choose ε
#
# ε is a rate: it takes its meaning from a distance. Decide within which distance places must be hard to
# tell apart, and by what factor at most a report may change anybody's odds there; then see what that costs.

# %%
print("ε per km   odds at 50 m   odds at 500 m   expected loss   planar noise, nearest output")
for epsilon in (2.0, 5.0, 10.0):
    other = build(spec.replace(privacy={"epsilon_per_km": epsilon}), folder / f"{epsilon:g}.zarr")
    near, far = math.exp(0.05 * epsilon), math.exp(0.5 * epsilon)
    ours, plain = (1000 * other[name] for name in ("loss_km", "plain_loss_km"))
    print(f"{epsilon:8.0f}   × {near:10.2f}   × {far:11.2f}   {ours:11.0f} m   {plain:25.0f} m")

# %% [markdown]
# The guide says what else belongs to the choice: how many reports a person makes, who sees what, and what
# the promise does not cover.
