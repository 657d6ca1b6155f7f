"""Program that reports what an interpreter has: `PYTHON interpreter_probe.py REQUEST`. Prints one line of JSON.

The request is JSON: `modules` and `distributions` to look for, `groups` of entry points, and the distribution
`engine`, whose requirements are reported. No module that is looked for is imported.

The interpreter may be of any version and may have no packages: the syntax is that of all versions since 2.7, the
program imports the standard library only, and it neither imports nor is imported by other modules when it runs.
"""

import json
import os
import sys

#: A program that hangs is ended by the kernel after this number of seconds, also without the process that started it.
ALARM_S = 120
MARK = "verl_server_probe"

if __name__ == "__main__":
    answer = {MARK: [1], "python": list(sys.version_info[:3])}  # type: dict[str, object]
    if sys.version_info >= (3, 8):  # noqa: UP036 - this program also runs in old interpreters
        import importlib.util
        import signal
        from importlib import metadata

        signal.alarm(ALARM_S)
        here = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
        request = json.loads(sys.argv[1])
        folders, versions, plugins, requirements = {}, {}, [], []
        for name in request["modules"]:
            try:
                spec = importlib.util.find_spec(name)
            except (ImportError, ValueError):
                spec = None
            # A folder without files of Python has no origin: a package that was uninstalled can leave such a folder.
            origin = None if spec is None else spec.origin
            places = [] if spec is None or origin is None else list(spec.submodule_search_locations or [origin])
            folders[name] = places[:1]
        for name in request["distributions"]:
            found = list(metadata.distributions(name=name))
            versions[name] = [found[0].version] if found else []
            if found and name == request["engine"]:
                requirements = list(found[0].requires or [])
        for distribution in metadata.distributions():
            plugins += [point.value for point in distribution.entry_points if point.group in request["groups"]]
        answer.update({"folders": folders, "versions": versions, "plugins": plugins, "requirements": requirements})
    sys.stdout.write(json.dumps(answer) + "\n")
