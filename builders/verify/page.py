"""The HTML page of a build report."""

from __future__ import annotations

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from builders.verify.plots import plot_bars, plot_pairs, plot_parity
from builders.verify.report import BuildReport

_MIB = 1024 * 1024

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Build report: {{ r.model }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a202c }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #e2e8f0 }
table { border-collapse: collapse; margin: .6rem 0 } th, td { padding: .2rem .7rem; border-bottom: 1px solid #edf2f7 }
th { text-align: left } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.ok { color: #276749 } .bad { color: #c53030; font-weight: 600 } .none { color: #718096; font-style: italic }
svg { max-width: 100%; height: auto } code { font-size: .85em; word-break: break-all }
</style>
</head>
<body>
<h1>{{ r.model }}, {{ r.precision }}{% if r.version is not none %}, version {{ r.version }}{% endif %}</h1>
<p>{{ verdict(r.gate) }}</p>
<p>{{ r.date }} · {{ r.machine }}<br><code>{{ r.model_sha256 }}</code></p>

<h2>Steps: sites and nodes</h2>
{% if r.steps %}
<table><tr><th>step</th><th class="n">sites</th><th class="n">expected</th><th class="n">nodes before</th>
<th class="n">after</th><th class="n">s</th><th>note</th></tr>
{% for s in r.steps %}
<tr><td>{{ s.name }}</td><td class="n {{ 'bad' if s.found != s.expected }}">{{ dash(s.found) }}</td>
<td class="n">{{ dash(s.expected) }}</td><td class="n">{{ s.nodes_before }}</td><td class="n">{{ s.nodes_after }}</td>
<td class="n">{{ '%.2f' % s.seconds }}</td><td>{{ s.note }}</td></tr>
{% endfor %}</table>
{{ plots.steps }}
{% if r.operators %}<p>Operators of the final graph:
{% for name, count in r.operators.items() %}{{ name }} {{ count }}{{ ', ' if not loop.last else '.' }}{% endfor %}</p>
{% endif %}
{% else %}<p class="none">{{ r.reason('steps') }}</p>{% endif %}

<h2>Size</h2>
{% if r.sizes %}{{ plots.sizes }}{% else %}<p class="none">{{ r.reason('sizes') }}</p>{% endif %}

<h2>Build time</h2>
{% if r.times %}<p>{{ '%.1f' % total }} s in all.</p>{{ plots.times }}
{% else %}<p class="none">{{ r.reason('times') }}</p>{% endif %}

<h2>Parity by layer</h2>
{% if r.gate %}
<p class="{{ 'ok' if r.gate.parity.passed else 'bad' }}">{{ r.gate.parity.summary() }}</p>
<p>{{ r.gate.parity.cases }} batches against the FP32 reference.
{% if r.gate.parity.not_compared %}Not shown by the candidate: {{ r.gate.parity.not_compared | join(', ') }}.{% endif %}
</p>
{{ plots.parity }}
<table><tr><th>block</th><th class="n">worst cosine</th><th class="n">largest error</th>
<th class="n">worst channel or score</th><th>worst at</th></tr>
{% for b in r.gate.parity.blocks %}
<tr class="{{ '' if b.passed else 'bad' }}"><td>{{ b.name }}</td><td class="n">{{ '%.7f' % b.cosine }}</td>
<td class="n">{{ '%.3g' % b.error if b.error is not none else 'not finite' }}</td>
<td class="n">{% if b.channel_error is not none %}{{ '%.3f %%' % (100 * b.channel_error) }}
{% elif b.score_error is not none %}{{ '%.4f' % b.score_error }}{% endif %}</td>
<td>{{ b.where }}</td></tr>
{% endfor %}</table>
{% else %}<p class="none">{{ r.reason('gate') }}</p>{% endif %}

<h2>Accuracy</h2>
{% if r.gate and r.gate.metrics %}
<table><tr><th>task</th><th>data</th><th class="n">judged</th><th class="n">FP32</th><th class="n">candidate</th>
<th class="n">loss</th><th class="n">limit</th><th class="n">changed</th></tr>
{% for m in r.gate.metrics %}
<tr><td>{{ m.task }}</td><td>{{ m.dataset }}</td><td class="n">{{ m.count }}</td>
<td class="n">{{ '%.4f' % m.reference }}</td><td class="n">{{ '%.4f' % m.candidate }}</td>
<td class="n {{ 'ok' if m.passed else 'bad' }}">{{ '%.3f %%' % (100 * m.loss) }}</td>
<td class="n">{{ '%.3f %%' % (100 * m.limit) }}</td><td class="n">{{ m.changed }}</td></tr>
{% endfor %}</table>
{% elif r.gate %}<p class="none">no task metric was taken: the candidate did not run, or no data was given</p>
{% else %}<p class="none">{{ r.reason('gate') }}</p>{% endif %}
{% if r.bisect %}<p class="bad">{{ r.bisect.summary() }}</p>
<table><tr><th>build</th><th>gate</th></tr>
{% for t in r.bisect.trials %}<tr><td>{{ t.steps | join(', ') or 'no step' }}</td>
<td class="{{ 'ok' if t.passed else 'bad' }}">{{ 'passes' if t.passed else t.error or 'fails' }}</td></tr>{% endfor %}
</table>{% endif %}

<h2>Memory by profile</h2>
{% if r.memory %}{{ plots.memory }}{% else %}<p class="none">{{ r.reason('memory') }}</p>{% endif %}
</body>
</html>
"""


def render_page(report: BuildReport) -> str:
    """The report as one HTML page; every text of it is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PAGE).render(
        r=report, verdict=_verdict, dash=_dash, plots=_plots(report), total=sum(report.times.values())
    )


def _dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def _verdict(gate: object) -> str:
    passed = getattr(gate, "passed", None)
    if passed is None:
        return Markup('<span class="none">not judged: the accuracy gate was not run</span>')
    if passed:
        return Markup('<span class="ok">passes the accuracy gate</span>')
    reasons = Markup("; ").join(getattr(gate, "reasons", ()))
    return Markup('<span class="bad">fails the accuracy gate: {}</span>').format(reasons)


def _plots(report: BuildReport) -> dict[str, Markup]:
    """SVG by section; sections without data are left out."""
    made: dict[str, str] = {}
    if report.steps:
        made["steps"] = plot_pairs(
            [step.name for step in report.steps],
            [step.nodes_before for step in report.steps],
            [step.nodes_after for step in report.steps],
            "nodes of the graph",
        )
    if report.sizes:
        made["sizes"] = plot_bars({name: size / _MIB for name, size in report.sizes.items()}, "MiB")
    if report.times:
        made["times"] = plot_bars(report.times, "seconds")
    if report.gate:
        made["parity"] = plot_parity(report.gate.parity)
    if report.memory:
        rows = {f"{row.bucket} × {row.batch}": row.activation_bytes / _MIB for row in report.memory}
        made["memory"] = plot_bars(rows, "MiB of activations (tokens × texts)")
    return {name: Markup(svg) for name, svg in made.items()}  # noqa: S704 - matplotlib escapes what it writes
