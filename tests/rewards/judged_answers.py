"""Pairs of an expected answer and an answer, judged by hand as right (True) or wrong (False).
docs/rewards.md has the rules.
"""

from __future__ import annotations

# expected: (right answers, wrong answers)
_BY_FAMILY: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "equalities": {
        "5": (
            (
                "5",
                "x=5",
                "x = 5",
                "5 = x",
                "2+3=5",
                r"x = 2+3 = 5",
                r"\frac{10}{2} = 5",
                "f(2) = 5",
                "a+b = 5",
                r"\angle ABC = 5",
                r"\text{Area} = 5",
                "x_1 = 5",
                "m+n = 2+3 = 5",
                "A = bh = 5",
            ),
            (
                "4=5",
                "1=2=3=4=5",
                "5=4",
                "x = 4 = 5",
                "x=5=4",
                "2x = 5",
                "x^2 = 5",
                "x \\ne 5",
                "x > 5",
                "5 = 6 = 5",
                "x = y + 5",
                "2 + 2 = 5",
                "x = -5",
            ),
        ),
        "18": (("18 = x", "x = 18", "18"), ("18 = 19", "x = 81", "18x")),
        "x=18": (("x = 18", "18 = x", "18", "x=\\frac{36}{2}"), ("y=18", "x=17", "17", "x^2=18")),
        "y = 2x + 3": (
            ("y=2x+3", "2x+3", "y = 3 + 2x", "2x - y + 3 = 0", "2x+3 = y"),
            ("y=2x-3", "2x", "y=2x", "3"),
        ),
        "5x - 7y + 11z + 4 = 0": (
            ("-5x+7y-11z-4=0", "5x-7y+11z=-4", "10x-14y+22z+8=0"),
            ("5x-7y+11z-4=0", "5x-7y+11z+4"),
        ),
        "x^2+2x+1": (
            ("(x+1)^2", "f(x) = (x+1)^2", "(x+1)^2 = x^2+2x+1", "x(x+2)+1"),
            ("(x-1)^2", "x^2+2x", "x^2+2x+1=0", "(x+1)^3"),
        ),
    },
    "subscripts": {
        "5": ((), ("5_6", "5_{6}", "x_5", "5_x", "5_{10}")),
        "52_8": (("52_8", "52_{8}", r"52_{\text{8}}"), ("52", "52_9", "42", "52_{16}", "25_8")),
        "x_1": (("x_1", "x_{1}"), ("x_2", "x", "x1", "1")),
        "a_n": (("a_n", "a_{n}"), ("a_m", "a", "n")),
    },
    "tuples and intervals": {
        "1,2": (
            (
                "1,2",
                "2, 1",
                r"1 \text{ and } 2",
                "1 and 2",
                r"\{1,2\}",
                "1, \\frac{4}{2}",
                "x=1, x=2",
                r"x = 1 \text{ or } x = 2",
            ),
            ("(1,2)", "[1,2]", "1", "1,2,3", "1,3", "12", "1.2", "(2,1)", "1,1"),
        ),
        "(1,2)": (
            ("(1,2)", r"\left(1, 2\right)", r"(1, \frac{4}{2})", "(1; 2)", "(x,y) = (1,2)"),
            ("1,2", "(2,1)", "[1,2]", "(1,2]", r"\{1,2\}", "(1,2,3)", "(1)"),
        ),
        "[1,2]": (
            ("[1,2]", r"\left[1,2\right]", r"x \in [1,2]", r"x\in[1, 2]"),
            ("(1,2)", "[1,2)", "(1,2]", "[2,1]", "1,2", r"\{1,2\}"),
        ),
        r"(-\infty, 2) \cup (3, \infty)": (
            (
                r"(-\infty,2)\cup(3,\infty)",
                r"(3,\infty) \cup (-\infty,2)",
                r"x \in (-\infty, 2) \cup (3, \infty)",
                r"(-\infty,2) ∪ (3,∞)",
            ),
            (
                r"(-\infty,2]\cup(3,\infty)",
                r"(-\infty,2)",
                r"(-\infty,2)\cap(3,\infty)",
                r"(-\infty,3)\cup(2,\infty)",
            ),
        ),
        r"x \in [-2,7]": (("[-2,7]", r"x\in[-2,7]"), ("(-2,7)", r"y \in [-2,7]", "-2,7")),
        r"(0,9) \cup (9,36)": ((r"(9,36)\cup(0,9)",), ("(0,36)", r"(0,9) \cup (9,36]")),
        r"\left( 3, \frac{\pi}{2} \right)": (
            (r"(3, \pi/2)", r"(3,\dfrac{\pi}{2})"),
            (r"(3, \pi)", r"(\frac{\pi}{2}, 3)", "(3, 1.57)"),
        ),
        r"(-\infty,\infty)": (
            (r"\mathbb{R}", r"(-\infty, \infty)", r"\text{all real numbers}"),
            (r"(0,\infty)", r"[0,\infty)", "0"),
        ),
        "x=1, y=2": (("x=1, y=2", "y=2, x=1", "1, 2"), ("x=2, y=1", "2, 1", "x=1")),
        "58,500": (("58500", "58,500", r"58{,}500", r"58,\!500"), ("58, 501", "58.5", "585", "58")),
        "100, 200": (("100,200", "200,100"), ("100", "(100,200)", "200")),
    },
    "percent": {
        "3": ((), (r"3\%", "3%", r"3 \text{ percent}", r"300\%x")),
        r"3\%": (
            (r"3\%", "3%", "3", "0.03", r"\frac{3}{100}", r"3 \text{ percent}", r"3.0\%"),
            ("0.3", r"30\%", "300", r"0.03\%"),
        ),
        "0.03": ((r"3\%", "0.03", "3/100"), ("3", "0.3", r"0.03\%")),
        r"237.5\%": (("237.5", r"237.5\%", "2.375"), ("23.75", r"237\%", "237")),
        r"\frac{1}{2}": ((r"50\%",), ("50", r"0.5\%", r"5\%")),
    },
    "units and degrees": {
        "45": (
            (
                "45°",
                r"45^\circ",
                r"45^{\circ}",
                r"45 \text{ degrees}",
                "45 degrees",
                r"45\text{ cm}",
                "45 cm",
                "45 square feet",
            ),
            ("46°", "54°", "45x", "45'", "45!"),
        ),
        r"90^\circ": (
            ("90", "90°", r"90^\circ", r"90\text{ degrees}", "90 degrees"),
            ("9", r"90\%", r"\frac{\pi}{3}", "180"),
        ),
        r"864 \mbox{ inches}^2": (
            ("864", r"864\text{ in}^2", r"864 \text{ square inches}", "864 inches^2"),
            ("865", r"864 \text{ feet}^2", r"864\text{ inches}"),
        ),
        r"5.4 \text{ cents}": (("5.4", r"5.4\text{ cents}", "5.4 cents"), ("54", r"\$5.4", "5")),
        r"\$32,348": (
            ("32348", r"\$32,348", r"\$32348", "32,348 dollars", "$32,348"),
            ("32", "348", "32.348", "32348 cents"),
        ),
        r"€5": (("5", "€5", "5 €", "5 euros", "5.00"), ("6", r"\$5", "5 cents")),
        r"£5": (("5", "£5", "5 pounds"), ("€5", "50")),
        "5 ": (("€5", "£5", "5€"), ("-€5", "€50")),
        r"10\text{ m}": (
            ("10", "10 m", r"10\,\mathrm{m}", r"10 \text{ meters}", "10 metres"),
            (r"10\text{ cm}", "10 km", "100", r"10\text{ m}^2"),
        ),
        r"164 \pi \mbox{ square feet}": (
            (r"164\pi", r"164\pi \text{ square feet}"),
            ("164", r"146\pi"),
        ),
        "5400000": (
            ("5.4 million", r"5.4\text{ million}", r"5.4 \times 10^6"),
            ("5.4", "5.4 billion"),
        ),
        r"\frac{270}7\text{ degrees}": (
            (r"\frac{270}{7}", r"\frac{270}{7}^\circ", "270/7"),
            (r"\frac{27}{7}", "38.57"),
        ),
        r"40\text{ min}": (("40", "40 minutes", r"40\text{ min}"), ("40 hours", "4")),
        "7 days": (("7", r"7\text{ days}"), ("8 days", "7 weeks")),
    },
    "scientific notation": {
        "1200": (
            (
                "1.2e3",
                "1.2E3",
                r"1.2\times10^3",
                r"1.2 \times 10^{3}",
                r"1.2\cdot 10^3",
                "12e2",
                "1,200",
                "1200.0",
                r"12\times 10^2",
            ),
            (
                "1.2e4",
                r"1.2\times10^4",
                "1.2",
                "1.2e-3",
                "120",
                r"1.2 \times 10^{-3}",
                "1.2e",
                "1.2^3",
            ),
        ),
        "0.0000672": (
            ("6.72e-5", r"6.72\times 10^{-5}", ".0000672"),
            ("6.72e5", r"6.72\times 10^{-4}", "6.72"),
        ),
        "10^{6}": (("1000000", "1,000,000", "1e6", "10^6"), ("100000", "10", "60", "1e7")),
        r"3 \times 10^8": (("300000000", "3e8", r"3\cdot10^8"), ("3e9", "3")),
    },
    "decimals": {
        r"\frac{1}{3}": (
            (
                r"\frac{2}{6}",
                "1/3",
                r"\dfrac13",
                r"0.\overline{3}",
                r"0.\bar{3}",
                r"0.333\ldots",
                r"\frac13",
                r"\frac{-1}{-3}",
            ),
            (
                "0.333",
                "0.33",
                "0.3",
                "0.333333",
                "0.3333333333333333",
                r"0.\overline{33}4",
                "3",
                "1/4",
                "0.333333333333333333333333",
            ),
        ),
        "1/2": (
            ("0.5", "0.50", ".5", r"\frac12", "2/4", r"\frac{3}{6}", "5e-1"),
            ("0.51", "0.49", "0.499999", "2", "1/2x", "-0.5"),
        ),
        r"\pi": (
            (r"\pi", "pi", "π", r"\frac{2\pi}{2}"),
            (
                "3.14",
                "3.1416",
                r"\frac{22}{7}",
                "3.14159265358979",
                r"2\pi",
                "3.141592653589793238462643",
            ),
        ),
        r"2\sqrt{3}": (("√12", "√(12)", "2√3", "2√(3)", "√ 12"), ("√1 2", "√13", "12", "√(1)2")),
        r"\sqrt{2}": (
            (r"\sqrt2", r"2^{1/2}", r"\frac{2}{\sqrt{2}}", "sqrt(2)", r"2^{0.5}"),
            ("1.41", "1.414", "1.41421356237", r"\sqrt{3}", "2", "1.414213562373095"),
        ),
        "0.35625": (
            (".35625", r"\frac{57}{160}", "0.356250", r"35.625\%"),
            ("0.356", "0.36", "0.3562"),
        ),
        "4.5": (
            ("4.5", r"\frac{9}{2}", r"4\frac{1}{2}", r"4 \frac12", "9/2", "4 1/2"),
            ("4", "5", "4.49", "45", r"4 \cdot \frac{1}{2}"),
        ),
        "3.14": (("3.14", r"\frac{157}{50}", "3.140"), (r"\pi", "3.1", "3.141")),
        "e": (("e", "e^1"), ("2.718", "2.71828182845905", "1")),
        "2": (
            ("2.0", "2.", "2", r"\frac{4}{2}", r"\sqrt{4}", "1.0+1", "+2"),
            ("1.9999", "2.0001", "-2", "2i", "1.99999999999999999"),
        ),
        r"\frac{\sqrt{3}}{2}": (
            (r"\sqrt{3}/2", r"\frac12\sqrt3", r"\sqrt{\frac{3}{4}}", r"0.5\sqrt{3}"),
            ("0.866", "0.8660254037844386", r"\frac{\sqrt{3}}{3}"),
        ),
    },
    "repeating decimals": {
        r"0.\overline{3}": (
            (
                r"\frac{1}{3}",
                r"0.\overline{3}",
                r"0.\overline{33}",
                r"0.3\overline{3}",
                r"0.\bar 3",
                "0.333...",
            ),
            ("0.3", "0.333", r"0.\overline{4}", r"3.\overline{3}"),
        ),
        r"\frac{1}{7}": ((r"0.\overline{142857}",), ("0.142857", r"0.\overline{14285}")),
        r"\frac{1}{6}": (
            (r"0.1\overline{6}", r"0.1666\ldots"),
            (r"0.\overline{16}", "0.1667", "0.16"),
        ),
        "1": ((r"0.\overline{9}",), ("0.999", "0.9")),
        r"\frac{137}{99}": ((r"1.\overline{38}",), ("1.38", r"1.3\overline{8}")),
        r"-\frac{2}{3}": (
            (r"-0.\overline{6}", r"\frac{-2}{3}", r"\frac{2}{-3}"),
            (r"0.\overline{6}", "-0.667", r"\frac23"),
        ),
    },
    "functions": {
        r"\frac{1}{2}": (
            (
                r"\cos 60^\circ",
                r"\sin 30^\circ",
                r"\cos(60°)",
                r"\sin\frac{\pi}{6}",
                r"\cos \frac{\pi}{3}",
                r"\sin(30^{\circ})",
            ),
            (r"\cos 30^\circ", r"\sin 60^\circ", r"\cos 60", r"\sin 30", r"\tan 45^\circ"),
        ),
        r"\cos 60^\circ": ((r"\frac12", "0.5", r"\sin 30^\circ"), (r"\cos 30^\circ", "60", "1")),
        r"\sqrt{3}": (
            (r"\tan 60^\circ", r"\tan\frac{\pi}{3}", r"2\cos 30^\circ"),
            (r"\tan 30^\circ", "1.732"),
        ),
        r"\log 2": (
            (
                r"\log 2",
                r"\log(2)",
                r"\log_{10} 2",
                r"\frac{1}{2}\log 4",
                "log 2",
                r"\frac{\log 4}{2}",
                r"\log_{10}(2)",
                "log(2)",
            ),
            ("0.301", "0.30103", r"\log 3", r"\log_2 10", "0.6931", "2"),
        ),
        r"\ln 2": (
            (
                r"\ln 2",
                r"\ln(2)",
                r"\log 2",
                r"\frac{1}{2} \ln 4",
                r"\log_e 2",
                "ln(2)",
                r"-\ln \frac12",
            ),
            ("0.693", r"\ln 3", r"\log_2 3"),
        ),
        r"\log_2 8": (
            ("3", r"\log_2(8)", r"\frac{\ln 8}{\ln 2}", r"\frac{\log 8}{\log 2}"),
            (r"\log_8 2", "4", "8"),
        ),
        "3": (
            (
                r"\log_2 8",
                r"\log_{10} 1000",
                r"\sqrt{9}",
                r"\sqrt[3]{27}",
                r"\sqrt[3] {27}",
                "|-3|",
                r"\left|-3\right|",
            ),
            (r"\log_2 9", r"\sqrt{3}", r"\sqrt[3]{9}", "|-4|"),
        ),
        r"\frac{\pi}{4}": (
            (r"\arctan 1", r"\arctan(1)", r"\frac14\pi", "pi/4", r"0.25\pi"),
            ("0.785", r"45", r"\frac{4}{\pi}"),
        ),
        r"e^2": ((r"e^{2}", r"e \cdot e", r"\exp(2)"), ("7.389", "2e", "e^3")),
    },
    "sets": {
        r"\{1,2,3\}": (
            (r"\{3,2,1\}", "1,2,3", r"\left\{1,2,3\right\}", r"\{1, 2, \frac{6}{2}\}"),
            (r"\{1,2\}", r"\{1,2,4\}", "(1,2,3)", "[1,2,3]", "6"),
        ),
        r"\{5\}": (("5", r"\{5\}"), (r"\{6\}", r"\{5,6\}", r"\{\}")),
        r"\emptyset": ((r"\varnothing", r"\emptyset", r"\{\}", "∅"), ("0", r"\{0\}", "1")),
        r"\{1\pm\sqrt{5},-2\}": (
            (r"\{-2, 1+\sqrt5, 1-\sqrt5\}", r"1+\sqrt{5}, 1-\sqrt{5}, -2"),
            (r"\{1\pm\sqrt{5}\}", r"\{1\pm\sqrt{5}, 2\}", r"\{1+\sqrt5,-2\}"),
        ),
        "1,-2": ((r"-2,1", r"\{-2,1\}", "x=1,-2"), ("1,2", "-1,2", "(1,-2)")),
        r"-2 \text{ or } -12": (("-12,-2", r"-2,-12", "-2 or -12"), ("-2", "12,2")),
    },
    "matrices": {
        r"\begin{pmatrix} 1 & 0 \\ 0 & 3 \end{pmatrix}": (
            (
                r"\begin{pmatrix}1&0\\0&3\end{pmatrix}",
                r"\begin{bmatrix}1&0\\0&3\end{bmatrix}",
                r"\begin{pmatrix} 1 & 0 \\ 0 & \frac{6}{2} \\ \end{pmatrix}",
            ),
            (
                r"\begin{pmatrix}0&1\\3&0\end{pmatrix}",
                r"\begin{pmatrix}1&0&0&3\end{pmatrix}",
                r"\begin{vmatrix}1&0\\0&3\end{vmatrix}",
                "3",
                "(1,0,0,3)",
            ),
        ),
        r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}": (
            (
                r"\begin{pmatrix} -\frac13 \\ \frac23 \\ \frac53 \end{pmatrix}",
                r"\begin{bmatrix}-1/3\\2/3\\5/3\end{bmatrix}",
            ),
            (
                r"\begin{pmatrix} -0.333 \\ 0.667 \\ 1.667 \end{pmatrix}",
                r"\begin{pmatrix} -1/3 & 2/3 & 5/3 \end{pmatrix}",
                r"\begin{pmatrix} 1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
            ),
        ),
    },
    "words": {
        r"\text{east}": (
            ("east", "East", r"\text{East}", r"\textbf{east}", r"\text{ east }"),
            ("seat", "west", "eas", "e", "easts"),
        ),
        r"\text{(C)}": (
            ("C", "(C)", r"\text{C}", r"\text{(C)}", r"\textbf{(C)}", r"(\text{C})"),
            ("B", r"\text{(B)}", "D", "CC"),
        ),
        r"\text{Evelyn}": (
            ("Evelyn", "evelyn", r"\text{Evelyn}"),
            ("Eve", "Evelyn and Bob", "Bob"),
        ),
        "even": ((r"\text{even}", "Even"), ("odd", "neve", "event")),
        r"\text{Yes}": (("yes", "Yes"), ("no", "y")),
        "A": (("A",), ("a", "B")),
        "ellipse": ((r"\text{ellipse}", r"\text{Ellipse}"), ("circle", r"\text{parabola}")),
    },
    "signs, factorials, products": {
        "5": (
            ("+5", "(5)", "{5}", "--5", "|5|", "5.", "$5$", r"\(5\)"),
            (
                r"\pm 5",
                "5x",
                "5!",
                "-5",
                "5i",
                "5e",
                r"5\pi",
                "55",
                r"\sqrt{5}",
                "5^2",
                "1/5",
                "5a",
                "5,5",
                "",
            ),
        ),
        r"\pm 5": (
            (r"\pm 5", r"\pm5", "5, -5", "-5, 5", r"\{-5,5\}", r"x = \pm 5", "x=5, x=-5"),
            ("5", "-5", r"\pm 4", "(5,-5)", "0"),
        ),
        r"1 \pm \sqrt{19}": (
            (
                r"1+\sqrt{19}, 1-\sqrt{19}",
                r"1-\sqrt{19},1+\sqrt{19}",
                r"1\pm\sqrt{19}",
                r"1\mp\sqrt{19}",
            ),
            (r"1+\sqrt{19}", r"-1\pm\sqrt{19}", r"\pm\sqrt{19}"),
        ),
        "120": (("5!", "5 \\cdot 4!", "120"), ("5", "6!", "4!", r"5!!")),
        "6xy": (
            ("6yx", r"2x \cdot 3y", "6 x y", r"6\cdot x\cdot y"),
            ("6x", "6x+y", "6x^y", "6xyz"),
        ),
        "2x": ((r"2 \cdot x", "x+x", "x2", "2*x", "x*2"), ("x^2", "2", "x", "2+x", "2y")),
        "-5": (("-5", "− 5", "-(5)", r"-\frac{10}{2}"), ("5", "+5", r"\pm 5", "5-")),
        "x>3": (("3<x", "x > 3"), ("x<3", r"x\ge 3", "3", "x=3")),
        "10": (
            (
                r"\binom{5}{2}",
                r"\binom{5}{3}",
                r"\frac{5!}{3!2!}",
                "2*5",
                "(2)(5)",
                "2(5)",
                "(2)5",
                r"20(\frac{1}{2})",
            ),
            ("7", "3(5)", r"\binom{5}{1}", "25", "2,5", "1 0"),
        ),
        "1,000,000": (("10^6", "1000000"), ("1", "1,0,0")),
        "x^{10}": (("x^{10}", r"x^5 \cdot x^5"), ("x^{1}0", "10x", "x^9")),
        "11,111,111,100": ((r"11,\! 111,\! 111,\! 100", "11111111100"), ("11", "11111111101")),
    },
}

PAIRS = [
    (expected, answer, right)
    for family in _BY_FAMILY.values()
    for expected, both in family.items()
    for right, answers in zip((True, False), both, strict=True)
    for answer in answers
]

_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # for gsm8k
    "5": (
        (
            "5",
            "5.0",
            "5.00",
            r"\$5",
            "$5",
            "5 apples",
            "5 cm",
            "5cm",
            "5kg",
            r"5\text{ apples}",
            r"5\%",
            "5%",
            "5°",
            r"5^\circ",
            "x = 5",
            "2+3=5",
            "5 m",
            "5 p.m.",
            "5pm",
            "+5",
            "(5)",
            "about 5",
            "5.",
            "5 dollars",
            "5/hour",
            r"\text{5}",
            r"x \approx 5",
            "5 a day",
            "Total: 5",
            "$5.00",
            "005",
            r"\textbf{5}",
            "5e0",
            r"\boxed{5}",
            "5-foot",
        ),
        (
            "5x",
            "5!",
            r"\pm 5",
            "±5",
            "-5",
            "5y",
            "5n",
            "5i",
            "5^2",
            "5_6",
            "1/5",
            r"\frac{5}{1}2",
            "4=5",
            "2+2=5",
            "5, 6",
            "5 or 6",
            "5 million",
            "5e3",
            r"5\pi",
            r"\sqrt{5}",
            "f(5)",
            "-(5)",
            "minus 5",
            "x_5",
            "5(2)",
            "5*2",
            "5+x",
            "x-5",
            "5xy",
            r"5\cdot x",
            "5k",
            "5 thousand",
            "2^5",
            "|x|5",
            "5'2",
            "log 5",
            "5 x",
            "",
            "five",
        ),
    ),
    "1200": (
        ("1,200", "1200.00", "1.2e3", r"1.2\times10^3", r"1{,}200", "$1,200 per week", "1200 km/h"),
        ("12,00", "1.2", "120", "1200x", "1.2e4"),
    ),
    "24": (
        ("24 cm^2", r"24\text{ cm}^2", r"24 \text{ m}^{3}", "24 m²", "24 square feet", "24ft^2."),
        ("24x^2", "24 y^{2}", "24^2", r"24\pi^2", "24 cm^4", "2 cm^2", "24ab^2", "24 dx^2"),
    ),
    "-3": (("-3", "−3", r"-\$3", "-3.0"), ("3", "--3", "-3x", r"\pm 3")),
    "0.5": ((".5", "0.50"), ("1/2x", "5", "0.55")),
}

NUMBERS = [
    (expected, answer, right)
    for expected, both in _NUMBERS.items()
    for right, answers in zip((True, False), both, strict=True)
    for answer in answers
]
