"""One offline HTML file of what was measured."""

from paceline.lab.report.write import write_report

__all__ = ["write_report"]
