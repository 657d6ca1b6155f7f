"""`make gpu-proof`: everything of this project that only a GPU can prove, in under nine minutes.

`__main__.py` runs the items of `items.py` one by one, each in a process of its own with a deadline (`runner.py`), and
writes a JSON file, a plot and a log (`report.py`). An item is a test of `test_gpu.py` or a measurement of
`weight_sync.py`. What an item has measured reaches the JSON file through `record` (`settings.py`).
"""
