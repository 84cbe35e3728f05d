"""Builders: from a Hugging Face encoder to a model repository that Triton serves.

`python -m builders --help` lists the commands. Modules, in the order the data takes:

* `settings`  deploy.yaml as one typed, frozen tree
* `source`    where the model is and what it says of itself
* `tiling`    a longer position table for a model that has a short one
* `encoder`, `export`  the ONNX graph with the lanes' contract
* `graph_file` graphs as files, their weights inside or beside
* `render`    every config.pbtxt
* `publish`   a version of the repository, complete or absent
* `server`    a real tritonserver from the wheel
* `serving`   what runs inside Triton: the entry and the lane model, copied into each version
"""
