"""Where results stand in what models really write: each paper's phrasing, boxes, units, several numbers, fences."""

import pytest

from dlm_jax.evals import expressions, extractors, tasks

NUMBERS = [  # reference, answer, found by; right
    ("18", "16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "hash"),
    ("70000", "He made 200,000 - 130,000 = 70,000.\n#### 70,000", "hash"),
    ("-5", "It fell.\n#### -5", "hash"),
    ("0.5", "#### .50", "hash"),
    ("18", "#### $18.00\n\nQuestion: another one?", "hash"),
    ("1450000", "#### 1,450,000 people", None),  # words behind the marks are not GSM8K's form
    ("18", "Therefore, she makes $\\boxed{18}$ dollars.", "boxed"),
    ("18", "\\[\n\\boxed{\\$18}\n\\]", "boxed"),
    ("1800", "so the answer is $\\boxed{1,800}$.", "boxed"),
    ("1800", "\\boxed{1{,}800}", "boxed"),
    ("18", "\\boxed{18 \\text{ dollars}}", "boxed"),
    ("18", "\\boxed{9 + 9 = 18}", None),  # a box is an expression: none of its parts counts
    ("18", "First \\boxed{3}. No: \\boxed{18}", "boxed"),
    ("18", "**Final Answer**\n\nThe final answer is $\\boxed{18}$", "boxed"),
    ("18", "The final answer is 18", "final_answer"),
    ("18", "The final answer is **18**.", "final_answer"),
    ("18", "The final answer is [18]", "final_answer"),
    ("18", "Final Answer: The final answer is $18$. I hope it is correct.", "final_answer"),
    ("18", "The final answer is [$18.00].", "final_answer"),
    ("18", "the final answer is: $18.00 per day.", "final_answer"),
    ("18", "FINAL ANSWER: 18 dollars", "final_answer"),
    ("39", "So in total they had 74. After eating 35, they had 39. The answer is 39.", "answer_is"),
    ("39", "The answer is: 39 chocolates, of 74.", "answer_is"),
    ("39", "### Answer:\n39", "answer_is"),
    ("39", "**Answer:** 39", "answer_is"),
    ("39", "Answer: 74 - 35 = 39", "answer_is"),
    ("1000", "The answer is 1,000.", "answer_is"),
    ("50", "The answer is 50%.", "answer_is"),
    ("3.5", "The answer is 3.5 hours.", "answer_is"),
    ("-3", "The answer is -3 degrees.", "answer_is"),
    ("3/4", "The answer is 3/4 of the cake.", "answer_is"),
    ("8", "The answer is 9.\n\nWait, the answer is 8.", "answer_is"),
    ("10", "The correct answer is 10 apples and 3 pears", "answer_is"),
    ("20", "They need 4 * 5 = 20 buses in 2 cities, 20 in all.", "last_number"),
    ("20", "5 computers on 4 days: 20", "last_number"),
    ("2125", "Her total is $2,125.", "last_number"),
    ("64", "<think>5 or 7?</think>\nJohn needs $64", "last_number"),
]
CHOICES = [
    ("B", "Let's think step by step. ... The answer is (B).", "answer_is"),
    ("B", "the answer is (B)", "answer_is"),
    ("B", "The correct answer is **B**.", "answer_is"),
    ("B", "The correct answer is: B. erosion by wind", "answer_is"),
    ("B", "Answer: B", "answer_is"),
    ("J", "The answer is (J).", "answer_is"),
    ("B", "The final answer is (B).", "final_answer"),
    ("B", "\\boxed{B}", "boxed"),
    ("B", "$\\boxed{\\text{(B)}}$", "boxed"),
    ("B", "B", "letter"), ("B", " B.", "letter"), ("B", "(B) erosion", "letter"), ("B", "**B**", "letter"),
    ("B", "B) erosion, not A) heat", "letter"),
    ("B", "B. Because A is wrong", "letter"),
    ("B", "A planet cannot, so I choose B", "last_choice"),
    ("A", "I think that it has to be (A)", "last_choice"),
    ("Answer3", "Dry palms rub best.\nThe final answer is Answer3", "final_answer"),
    ("Answer3", "The final answer is **[Answer3]**", "final_answer"),
    ("Answer3", "the correct answer is answer3", "answer_is"),
    ("Ending2", "The final answer is Ending2.", "final_answer"),
    ("Ending2", "Ending2 makes sense", "letter"),
    ("Ending2", "I say that Ending2 makes sense", "last_choice"), ("B", "B\n\nWind erodes it.", "letter"),
    ("B", "The answer is B\n\nIt is not (C).", "answer_is"), ("B", "The final answer is [B]", "final_answer"),
]
WRONG = [
    ("18", "#### 19\nThe answer is 18.", "hash"), ("18", "I cannot tell.", None), ("18", "", None),
    ("18", "The answer is 118.", "answer_is"), ("18", "The answer is 18.5.", "answer_is"),
    ("18", "The answer is 18-20.", "answer_is"), ("1000", "The answer is 1.000", "answer_is"),
    ("B", "The answer is (C).", "answer_is"), ("B", "Apples fall.", None), ("B", "C. B is wrong", "letter"),
    ("Answer3", "The final answer is Answer1", "final_answer"), ("A", "A train passes", None),
]


def test_there_are_enough_shapes():
    assert len(NUMBERS) + len(CHOICES) >= 55 and len(PROGRAMS) + len(EXPRESSIONS) >= 40


@pytest.mark.parametrize("expected, text, by", [*NUMBERS, *CHOICES])
def test_right_answers_are_found(expected, text, by):
    found, name = extractors.extract(text, expected=expected)
    assert tasks.same_answer(found, expected) is (by is not None)
    assert by is None or name == by


@pytest.mark.parametrize("expected, text, by", WRONG)
def test_wrong_answers_are_wrong(expected, text, by):
    found, name = extractors.extract(text, expected=expected)
    assert not tasks.same_answer(found, expected) and name == by


@pytest.mark.parametrize("text, found", [
    ("so \\boxed{3\\sqrt{5}}.", "3\\sqrt{5}"), ("\\boxed{1, 2} or \\boxed{2 \\text{ or } 3}", "2 \\text{ or } 3"),
    ("Final Answer: The final answer is $[2,5)$. I hope it is correct.", "[2,5)"),
    ("The final answer is $1,2$", "1,2"), ("The answer is 3.5.", "3.5"), ("Answer: x+1", "x+1"), ("x+1", None),
    ("The answer is 3. The final answer is \\frac12.", "\\frac12"), ("\\boxed{1", None)])
def test_expressions_are_found_as_they_stand(text, found):
    assert extractors.expression(text) == found


F = "def f(x):\n    return 1"
BODY = "    y = 1\n    return y"
PROGRAMS = [
    ("```python\n" + F + "\n```", F),
    ("Here is the function:\n\n```python\n" + F + "\n```\n\nIt returns 1.", F),
    ("```py\n" + F + "\n```", F), ("```\n" + F + "\n```", F), ("~~~python\n" + F + "\n~~~", F),
    ("```Python 3\n" + F + "\n```", F), ("1. So:\n   ```python\n" + F + "\n   ```", F),
    ("```python\n" + F, F),  # cut off
    ("```bash\npip install x\n```\n```python\n" + F + "\n```", F),
    ("```python\n" + F + "\n```\nUse it:\n```python\nprint(f(1))\n```", F),
    (F + "\n```\n\nThis works since ...", F), (BODY + "\n```\nDone.", BODY), (BODY, BODY), ("\n" + BODY + "\n\n", BODY),
    ("import math\n" + F + "\n```", "import math\n" + F),
    ("[BEGIN]\n" + F + "\n[DONE]", F), (F + "\n[DONE]\nYou are an expert", F), ("<code>" + F + "</code>", F),
    (F.replace("\n", "\r\n"), F), (F, F),
    ("from here on:\n```python\n" + F + "\n```", F), ("class A:\n    pass\n```", "class A:\n    pass"),
    ("", None), ("\n\n", None), ("```python\n```", None),
]


@pytest.mark.parametrize("text, program", PROGRAMS)
def test_programs_are_found(text, program):
    assert extractors.extract(text, ("code",)) == (program, "code" if program else None)


EXPRESSIONS = [
    ("\\frac{1}{2}", "0.5"), ("\\dfrac12", "1/2"), ("-\\frac{2}{3}", "-2/3"), ("x=5", "5"), ("x \\in [-2,7]", "[-2,7]"),
    ("y = 2x + 3", "2x+3"), ("5\\text{ cm}", "5"), ("864 \\mbox{ inches}^2", "864"), ("10 dollars", "10"),
    ("\\text{Evelyn}", "Evelyn"), ("[2,5)", "[2, 5)"), ("1,234", "1234"), ("11,\\! 111", "11111"), ("90^\\circ", "90"),
    ("50\\%", "50"), ("\\$18.90", "18.9"), ("\\sqrt2", "\\sqrt{2}"), ("3\\sqrt{5}", "3\\sqrt5"), (".5", "0.5"),
    ("\\left(3,\\frac{\\pi}{2}\\right)", "(3, \\frac{\\pi}{2})"), ("(0.5, 2)", "(\\frac12,2)"), ("x^2+1", "x^2 + 1"),
    ("\\text{(B)}", "B"), ("6 - 5i", "6-5i"), ("\\boxed{7}", "7"), ("$\\frac{3}{2}$.", "1.5"), ("2\\pi", "2 \\pi"),
    ("x \\leq 3", "x\\le 3"), ("\\{1,2\\}", "{1,2}"),
]


@pytest.mark.parametrize("left, right", EXPRESSIONS)
def test_the_same_expression(left, right):
    assert expressions.same(left, right) and expressions.same(right, left) and expressions.same(left, left)


@pytest.mark.parametrize("left, right", [
    ("(2,5)", "[2,5)"), ("(1,2)", "(1,3)"), ("(1,2)", "(2,1)"), ("12", "1,2"), ("2", "3"),
    ("\\frac{1}{2}", "\\frac{2}{1}"), ("x+1", "x-1"), ("", ""), (None, "1"), ("1", None), (None, None), ("-5", "5"),
    ("2\\sqrt{3}", "3\\sqrt{2}")])
def test_other_expressions(left, right):
    assert not expressions.same(left, right)


@pytest.mark.parametrize("text", ["\\boxed{" * 5000, "```\n" * 5000, "(" * 5000, "the answer is " * 5000, "1," * 20000,
                                  "[BEGIN]" * 5000, " " * 50000 + "x", "-" * 20000, "A " * 20000, "#" * 20000,
                                  "9" * 20000, "\\frac{" * 3000, "the answer is " + "=" * 20000, "\\text{" * 3000,
                                  "1 " * 10000])
def test_degenerate_answers_take_no_time(text):
    for name, extract in extractors.EXTRACTORS.items():
        extract(text)
    expressions.same(text, "1")
    tasks.same_answer(text, "1")
