"""Software that is not ours, started by the tests to be measured against and talked to.

Nothing of it is committed: jars are gathered by Maven into the git-ignored `.peers/`.
"""
