"""Load generator: what is sent when, by which processes, and what came of it.

* `texts`    texts of wanted lengths from the user's corpus or from what Python ships
* `plan`     arrivals, classes, replayed traces: the requests of a run
* `target`   how a server is asked: Triton over gRPC, or an OpenAI-like HTTP endpoint
* `worker`   one process of the generator
* `run`      several of them, and their progress
* `records`  one row per request; JSON lines
* `summary`  percentiles, throughput, errors, and whether the generator itself was late
* `metrics`  Triton's metrics, sampled while the load runs
* `plots`, `page`, `report`  PNG plots, the HTML page, the folder of a run
* `selftest` the generator's own floor and maximum rate, against servers that do nothing (`null_server`)
"""
