"""Tables, charts and pages about experiments.

Nothing is exported here: charts load matplotlib or plotly, so import the module that you need.
"""
