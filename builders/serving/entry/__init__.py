"""The entry model `encode`: decode, tokenise a whole dynamic batch, group by bucket, call the lanes.

Modules, in the order a request takes: `request` (what a request asks), `tokenise`, `ticket` (what is still owed to
a request), `group` (texts of one bucket), `dispatch` (who computes a group, and when it is answered), `longlane`,
`wakeup`. None imports Triton; `model.py` connects them to it.
"""
