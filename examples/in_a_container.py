"""Shows the profile for a container or pod that allows no namespaces. Outside of one it works too.

docker run --user 1000:1000 --cap-drop ALL --security-opt no-new-privileges IMAGE python in_a_container.py
"""

from toolcell import Policy, SandboxUnavailable, SyncRuntime

try:
    with SyncRuntime(policy=Policy(profile="container")) as runtime:
        result = runtime.execute_code("import os\nset_result(os.listdir('/etc'))")
        print(result.outcome, result.error.type if result.error else result.value)
        print("layers:", ", ".join(sorted(result.isolation.layers)))
        assert not result.ok
except SandboxUnavailable as exc:
    print("this machine cannot:", exc)
