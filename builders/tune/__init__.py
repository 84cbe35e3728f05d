"""`python -m builders tune`: which window, batch, processes, threads and buckets are best here, and may they stand.

* `buckets`  bucket edges that pad a sample of texts least, exactly
* `axis`     what is swept, as changes of the settings
* `trial`    one setting's measurements, and the judgement between two
* `sweep`    one axis after the other, in interleaved repeats; what is clearly worse is stopped
* `outcome`  what a sweep leaves: choice, noise, stop line, as JSON and as tables
* `apply`    the choice written into the settings file, comments kept
* `command`  the command line
"""
