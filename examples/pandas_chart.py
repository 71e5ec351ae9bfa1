"""Shows data analysis: a CSV file goes in, pandas and matplotlib work on it, a table and a chart come out."""

import tempfile
from pathlib import Path

from toolcell import SyncRuntime

CSV = b"day,city,euros\n1,Rome,10\n1,Oslo,4\n2,Rome,12\n2,Oslo,9\n"

SCRIPT = """
import matplotlib.pyplot as plt
import pandas as pd

sales = pd.read_csv("sales.csv")
by_city = sales.groupby("city").euros.sum()
by_city.plot.bar(title="Sales")
plt.savefig("sales.png")
set_result(by_city.to_dict(), files=["sales.png"])
"""

with SyncRuntime(packages=["pandas", "matplotlib"]) as runtime:
    result = runtime.execute_code(SCRIPT, files={"sales.csv": CSV})

assert result.ok, result.error
print(result.value)
with tempfile.TemporaryDirectory() as folder:
    for file in result.files:
        Path(folder, file.name).write_bytes(file.data or b"")
        print("saved", file.name, file.media_type)
