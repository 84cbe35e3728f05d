"""`python -m builders bench`: this product, a naive server and public peers side by side, and the stop line.

* `driver`     what the bench needs of a server: start, address, stop, its share of the CPU
* `product`    this project's own server, of a settings file with overrides or of another checkout
* `naive`, `naive_server`  the server people write first
* `peers`, `peer_model`, `litserve_server`  infinity-emb and LitServe, in an environment of their own
* `load`       the texts and loads of a bench
* `rounds`     A B C, A B C …: drift of the machine hits all alike
* `ladder`     the techniques of the reference case, switched on in turn; `cold` takes a build's warm-up out
* `compare`    is it slower, or is it noise: bootstrap, sign test
* `regression` against a stored run, and in pairs
* `result`     what a bench leaves, stored as JSON
* `stopline`   the objectives, held or not
* `report`     tables and the HTML page
* `session`    what a command line said, put together; one measuring command at a time
* `command`    the command line
"""
