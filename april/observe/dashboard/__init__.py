"""`april dashboard`: shows runs in a browser, during and after training. `april report`: the same page in one file.

The dashboard reads run folders, asks live brokers for their status in the role of a monitor, and writes nothing.
`folder.py` finds and follows the runs, `steps.py` and `index.py` hold their steps and samples in memory as columns,
`run_page.py` gives the run page its data, `query.py` filters samples, `sample_reader.py` reads single samples from
their files, and `app.py` is the HTTP server. The pages in `static/` are served as they are; `report.py` writes them and
the run page's data into one file.
"""
