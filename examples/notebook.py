# %% [markdown]
# Shows a notebook: `SyncRuntime` opens in one cell, is used in others, and closes in the last. It works although a
# notebook already runs an event loop. The cells are those of Jupytext and of editors.

# %%
from toolcell import SyncRuntime


def temperature(city: str) -> float:
    """Return the temperature of a city in degrees Celsius."""
    return {"Rome": 31.0, "Oslo": 17.5}[city]


runtime = SyncRuntime([temperature])
runtime.open()

# %%
result = runtime.execute_code("{city: call_tool('temperature', city=city) for city in ('Rome', 'Oslo')}")
print(result)

# %%
failed = runtime.execute_code("call_tool('temperature', city='Atlantis')")
print(failed.outcome, failed.error.message if failed.error else "")

# %%
runtime.close()
