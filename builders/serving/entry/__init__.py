"""The entry model `encode`: decode, tokenise a whole dynamic batch, group by bucket, call the lanes.

Modules, in the order a request takes: `request` (what a request asks), `tokenise` and `cutting` (texts to the pieces
that lanes compute), `ticket` (what is still owed to a request), `group` (pieces of one bucket), `dispatch` (who
computes a group, and when it is answered), `longlane`, `tasks` (from the lanes' rows to the answer). Beside them:
`wakeup`, and for the ensembles `lastrow` (queues that went to sleep; both begin with `quiet`), `warmup` (a process's
own first calls), `backlog` (small batches when many wait), `candidate` and `trial` (a version that answers some of
the requests), `metrics`, `tracing`. None imports Triton; `model.py` connects them to it.
"""
