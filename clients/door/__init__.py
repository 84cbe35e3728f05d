"""The OpenAI-compatible door: HTTP with JSON in front of the entry models, for clients that speak no Triton.

`python -m clients door --listen HOST:PORT --triton HOST:PORT`; needs the extra `door`. One process, one event loop;
for more, run several behind a proxy: limits and metrics are per process.

* `settings`     what it is told: options and DOOR_* variables
* `app`          routes; `endpoint` is what each request passes: key, limits, body, answer, log; `call` is the request
* `embeddings`, `rerank`, `classify`   the routes that compute, and which public form each follows
* `connection`   uvicorn's connection, bounded
* `bodies`       JSON bodies, checked; `token_ids` turns token ids back into text
* `catalog`      the entry models behind it: names, tasks, readiness
* `problems`     the one table from failures to HTTP answers
* `keys`, `limits`, `metrics`, `log`   what operating it takes
"""
