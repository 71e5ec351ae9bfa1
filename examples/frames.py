"""Shows frames as values: a DataFrame goes in, a tool takes and returns one, and a table comes out as what it is.

Needs `pip install pandas`.
"""

import pandas as pd

from toolcell import SyncRuntime, ToolRegistry

registry = ToolRegistry()


@registry.tool
def with_rates(sales: pd.DataFrame) -> pd.DataFrame:
    """Return the sales with the rate of exchange of each currency."""
    return sales.merge(pd.DataFrame({"currency": ["EUR", "NOK"], "rate": [1.0, 0.085]}), on="currency")


SCRIPT = """
sales = call_tool("with_rates", sales=sales)
sales["euros"] = sales.amount * sales.rate
sales.groupby("city").agg({"euros": ["sum", "max"]})
"""

sales = pd.DataFrame(
    {
        "city": pd.Categorical(["Rome", "Oslo", "Rome", "Oslo"]),
        "day": pd.date_range("2024-05-01", periods=4, tz="Europe/Rome"),
        "currency": ["EUR", "NOK", "EUR", "NOK"],
        "amount": [10.0, 400.0, 12.0, 900.0],
    }
)

with SyncRuntime(registry, packages=["pandas"]) as runtime:
    result = runtime.execute_code(SCRIPT, inputs={"sales": sales})

assert result.ok, result.error
print(result.value)  # a Table
frame = result.value.to_pandas()
assert frame.loc["Rome", ("euros", "max")] == 12
print(frame.columns.nlevels, "levels of labels")
