"""`april dashboard`: a run to be looked at in a browser, while it goes on and afterwards.

It reads the run folder, and asks a live broker as a monitor; it writes nothing. `folder.py` says which runs there are,
`steps.py` and `index.py` keep what is looked for of them in memory, as columns; `query.py` filters it, `one.py` reads
samples whole, `app.py` answers the browser. The pages are in `static/`, as they are.
"""
