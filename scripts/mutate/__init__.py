"""Change a solution's regions systematically, and see which changes no check sees.

``python -m scripts.mutate 3.10`` grades every change of ``operators`` with the checks of exercise
3.10 and writes the result into ``tests/mutants/table/``. If all checks pass a change, either a
promise has no check, or the change breaks no promise. For the second case the table says why.

Source of the idea: DeMillo, Lipton and Sayward 1978, "Hints on Test Data Selection"; Jia and Harman
2011, IEEE TSE 37(5), a survey.
"""
