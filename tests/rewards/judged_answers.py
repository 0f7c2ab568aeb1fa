"""Pairs of an expected answer and an answer, judged by hand as right (True) or wrong (False).
docs/rewards.md has the rules.

A line is `expected ⇒ right answers ≠ wrong answers`, with ` ; ` between answers. An indented line
continues the one above it.
"""

from __future__ import annotations

import re

_PAIRS = r"""
# equalities
5 ⇒ 5 ; x=5 ; x = 5 ; 5 = x ; 2+3=5 ; x = 2+3 = 5 ; \frac{10}{2} = 5 ; f(2) = 5 ; a+b = 5 ;
    \angle ABC = 5 ; \text{Area} = 5 ; x_1 = 5 ; m+n = 2+3 = 5 ; A = bh = 5 ≠ 4=5 ; 1=2=3=4=5 ;
    5=4 ; x = 4 = 5 ; x=5=4 ; 2x = 5 ; x^2 = 5 ; x \ne 5 ; x > 5 ; 5 = 6 = 5 ; x = y + 5 ;
    2 + 2 = 5 ; x = -5
18 ⇒ 18 = x ; x = 18 ; 18 ≠ 18 = 19 ; x = 81 ; 18x
x=18 ⇒ x = 18 ; 18 = x ; 18 ; x=\frac{36}{2} ≠ y=18 ; x=17 ; 17 ; x^2=18 ; , ; ()
y = 2x + 3 ⇒ y=2x+3 ; 2x+3 ; y = 3 + 2x ; 2x - y + 3 = 0 ; 2x+3 = y ≠ y=2x-3 ; 2x ; y=2x ; 3
5x - 7y + 11z + 4 = 0 ⇒ -5x+7y-11z-4=0 ; 5x-7y+11z=-4 ; 10x-14y+22z+8=0 ≠ 5x-7y+11z-4=0 ;
    5x-7y+11z+4
x^2+2x+1 ⇒ (x+1)^2 ; f(x) = (x+1)^2 ; (x+1)^2 = x^2+2x+1 ; x(x+2)+1 ≠ (x-1)^2 ; x^2+2x ;
    x^2+2x+1=0 ; (x+1)^3
# subscripts
5 ⇒ ≠ 5_6 ; 5_{6} ; x_5 ; 5_x ; 5_{10}
52_8 ⇒ 52_8 ; 52_{8} ; 52_{\text{8}} ≠ 52 ; 52_9 ; 42 ; 52_{16} ; 25_8
x_1 ⇒ x_1 ; x_{1} ≠ x_2 ; x ; x1 ; 1
a_n ⇒ a_n ; a_{n} ≠ a_m ; a ; n
# tuples and intervals
1,2 ⇒ 1,2 ; 2, 1 ; 1 \text{ and } 2 ; 1 and 2 ; \{1,2\} ; 1, \frac{4}{2} ; x=1, x=2 ;
    x = 1 \text{ or } x = 2 ≠ (1,2) ; [1,2] ; 1 ; 1,2,3 ; 1,3 ; 12 ; 1.2 ; (2,1) ; 1,1
(1,2) ⇒ (1,2) ; \left(1, 2\right) ; (1, \frac{4}{2}) ; (1; 2) ; (x,y) = (1,2) ≠ 1,2 ; (2,1) ;
    [1,2] ; (1,2] ; \{1,2\} ; (1,2,3) ; (1)
1,2 ⇒ x = 2, 1 ; x=2 or 1 ≠ x = 2, 3
x = 2, 3 ⇒ 3, 2 ; x = 3, 2 ; x=3, x=2 ≠ y = 2, 3 ; x=2, y=3
x=1, y=2 ⇒ x=1, 2 ≠ x=2, 1 ; 1, x=2 ; x=1, z=2
x = \frac{\pi}{4}+k\pi, k \in \mathbb{Z} ⇒ \frac{\pi}{4}+k\pi, k \in \mathbb{Z} ;
    k \in \mathbb{Z}, x = k\pi+\frac{\pi}{4} ≠ k\pi, k \in \mathbb{Z} ; \frac{\pi}{4}+k\pi
n \in \mathbb{Z}, n > 3 ⇒ n>3, n\in\mathbb{Z} ≠ n>4, n\in\mathbb{Z} ; n \in \mathbb{Z}
x=2 \text{ or } x=3 ⇒ x\in\{2,3\} ; x \in \{3, 2\} ≠ x\in\{2,4\}
1000, 2000 ⇒ 1,000, 2,000 ; 2,000, 1,000 ≠ 1,000, 2,001
(1000,2) ⇒ (1,000, 2) ; (1{,}000, 2) ≠ (1,000, 3) ; (1, 0, 2)
(2,3] ⇒ 2 < x \le 3 ; 2<x\leqq 3 ; 3 \geqslant x > 2 ; 2<x<=3 ; 2 < x ≤ 3 ≠ 2 < x < 3 ;
    2\le x<3 ; x\le 3 ; 2 > x \ge 3
2<x\le 3 ⇒ (2,3] ; x \in (2,3] ≠ y \in (2,3] ; [2,3] ; 2,3
y < 2x+1 ⇒ y-2x<1 ≠ y-2x<2 ; y-2x \le 1
x > 3 ⇒ x-3>0 ≠ x-3\ge 0
[0,\infty) ⇒ x \geq 0 ; 0 \le x ≠ x > 0 ; x \le 0 ; |x| \ge 0
(-\infty,1) \cup (3,\infty) ⇒ x<1 \text{ or } x>3 ; x > 3 or x < 1 ≠ x<1 ;
    x\le 1 \text{ or } x>3 ; x<1 \text{ or } y>3
(a,b) ⇒ a<x<b ≠ a\le x<b
[1,2] ⇒ [1,2] ; \left[1,2\right] ; x \in [1,2] ; x\in[1, 2] ≠ (1,2) ; [1,2) ; (1,2] ; [2,1] ; 1,2 ;
    \{1,2\}
(-\infty, 2) \cup (3, \infty) ⇒ (-\infty,2)\cup(3,\infty) ; (3,\infty) \cup (-\infty,2) ;
    x \in (-\infty, 2) \cup (3, \infty) ; (-\infty,2) ∪ (3,∞) ≠ (-\infty,2]\cup(3,\infty) ;
    (-\infty,2) ; (-\infty,2)\cap(3,\infty) ; (-\infty,3)\cup(2,\infty)
x \in [-2,7] ⇒ [-2,7] ; x\in[-2,7] ≠ (-2,7) ; y \in [-2,7] ; -2,7
(0,9) \cup (9,36) ⇒ (9,36)\cup(0,9) ≠ (0,36) ; (0,9) \cup (9,36]
\left( 3, \frac{\pi}{2} \right) ⇒ (3, \pi/2) ; (3,\dfrac{\pi}{2}) ≠ (3, \pi) ; (\frac{\pi}{2}, 3) ;
    (3, 1.57)
(-\infty,\infty) ⇒ \mathbb{R} ; (-\infty, \infty) ; \text{all real numbers} ≠ (0,\infty) ;
    [0,\infty) ; 0
x=1, y=2 ⇒ x=1, y=2 ; y=2, x=1 ; 1, 2 ≠ x=2, y=1 ; 2, 1 ; x=1
58,500 ⇒ 58500 ; 58,500 ; 58{,}500 ; 58,\!500 ≠ 58, 501 ; 58.5 ; 585 ; 58
100, 200 ⇒ 100,200 ; 200,100 ≠ 100 ; (100,200) ; 200
5 ⇒ 5 ≠ 5\text{ or 6} ; 5 \text{ and 6}
5,6 ⇒ 5 \text{ or } 6 ; 5\text{ or 6} ≠ 5\text{ order 6}
# clock times and dates, which are no ratios and differences
2:30 ⇒ 2:30 ; 02:30 ≠ 1:15 ; 12:30
3:10 ⇒ 3:10 ; 3/10 ≠ 10:3
2024-01-02 ⇒ 2024-01-02 ≠ 2021 ; 2024-01-03
# percent
3 ⇒ ≠ 3\% ; 3% ; 3 \text{ percent} ; 300\%x
3\% ⇒ 3\% ; 3% ; 3 ; 0.03 ; \frac{3}{100} ; 3 \text{ percent} ; 3.0\% ≠ 0.3 ; 30\% ; 300 ; 0.03\%
0.03 ⇒ 3\% ; 0.03 ; 3/100 ≠ 3 ; 0.3 ; 0.03\%
237.5\% ⇒ 237.5 ; 237.5\% ; 2.375 ≠ 23.75 ; 237\% ; 237
\frac{1}{2} ⇒ 50\% ≠ 50 ; 0.5\% ; 5\%
# units and degrees
45 ⇒ 45° ; 45^\circ ; 45^{\circ} ; 45 \text{ degrees} ; 45 degrees ; 45\text{ cm} ; 45 cm ;
    45 square feet ≠ 46° ; 54° ; 45x ; 45' ; 45!
25°C ⇒ 25 ; 25° ; 25^\circ\text{C} ≠ 25°F ; 25^\circ\mathrm{F}
25 ⇒ 25°C ; 25^\circ F ; 25^\circ\text{C} ≠ 25C ; 26°C
90^\circ ⇒ 90 ; 90° ; 90^\circ ; 90\text{ degrees} ; 90 degrees ≠ 9 ; 90\% ; \frac{\pi}{3} ; 180
864 \mbox{ inches}^2 ⇒ 864 ; 864\text{ in}^2 ; 864 \text{ square inches} ; 864 inches^2 ≠ 865 ;
    864 \text{ feet}^2 ; 864\text{ inches}
5.4 \text{ cents} ⇒ 5.4 ; 5.4\text{ cents} ; 5.4 cents ≠ 54 ; \$5.4 ; 5
\$32,348 ⇒ 32348 ; \$32,348 ; \$32348 ; 32,348 dollars ; $32,348 ≠ 32 ; 348 ; 32.348 ; 32348 cents
€5 ⇒ 5 ; €5 ; 5 € ; 5 euros ; 5.00 ≠ 6 ; \$5 ; 5 cents
£5 ⇒ 5 ; £5 ; 5 pounds ≠ €5 ; 50
5  ⇒ €5 ; £5 ; 5€ ≠ -€5 ; €50
10\text{ m} ⇒ 10 ; 10 m ; 10\,\mathrm{m} ; 10 \text{ meters} ; 10 metres ≠ 10\text{ cm} ; 10 km ;
    100 ; 10\text{ m}^2
164 \pi \mbox{ square feet} ⇒ 164\pi ; 164\pi \text{ square feet} ≠ 164 ; 146\pi
5400000 ⇒ 5.4 million ; 5.4\text{ million} ; 5.4 \times 10^6 ≠ 5.4 ; 5.4 billion
\frac{270}7\text{ degrees} ⇒ \frac{270}{7} ; \frac{270}{7}^\circ ; 270/7 ≠ \frac{27}{7} ; 38.57
40\text{ min} ⇒ 40 ; 40 minutes ; 40\text{ min} ≠ 40 hours ; 4
60 \text{ mph} ⇒ 60 miles per hour ; 60\text{ miles/hour} ≠ 60 km/h
7 days ⇒ 7 ; 7\text{ days} ≠ 8 days ; 7 weeks
# scientific notation
1200 ⇒ 1.2e3 ; 1.2E3 ; 1.2\times10^3 ; 1.2 \times 10^{3} ; 1.2\cdot 10^3 ; 12e2 ; 1,200 ; 1200.0 ;
    12\times 10^2 ≠ 1.2e4 ; 1.2\times10^4 ; 1.2 ; 1.2e-3 ; 120 ; 1.2 \times 10^{-3} ; 1.2e ; 1.2^3
0.0000672 ⇒ 6.72e-5 ; 6.72\times 10^{-5} ; .0000672 ≠ 6.72e5 ; 6.72\times 10^{-4} ; 6.72
10^{6} ⇒ 1000000 ; 1,000,000 ; 1e6 ; 10^6 ≠ 100000 ; 10 ; 60 ; 1e7
3 \times 10^8 ⇒ 300000000 ; 3e8 ; 3\cdot10^8 ≠ 3e9 ; 3
# decimals
\frac{1}{3} ⇒ \frac{2}{6} ; 1/3 ; \dfrac13 ; 0.\overline{3} ; 0.\bar{3} ; 0.333\ldots ; \frac13 ;
    \frac{-1}{-3} ≠ 0.333 ; 0.33 ; 0.3 ; 0.333333 ; 0.3333333333333333 ; 0.\overline{33}4 ; 3 ;
    1/4 ; 0.333333333333333333333333
1/2 ⇒ 0.5 ; 0.50 ; .5 ; \frac12 ; 2/4 ; \frac{3}{6} ; 5e-1 ≠ 0.51 ; 0.49 ; 0.499999 ; 2 ; 1/2x ;
    -0.5
\pi ⇒ \pi ; pi ; π ; \frac{2\pi}{2} ≠ 3.14 ; 3.1416 ; \frac{22}{7} ; 3.14159265358979 ; 2\pi ;
    3.141592653589793238462643
2\sqrt{3} ⇒ √12 ; √(12) ; 2√3 ; 2√(3) ; √ 12 ≠ √1 2 ; √13 ; 12 ; √(1)2
\sqrt{2} ⇒ \sqrt2 ; 2^{1/2} ; \frac{2}{\sqrt{2}} ; sqrt(2) ; 2^{0.5} ≠ 1.41 ; 1.414 ;
    1.41421356237 ; \sqrt{3} ; 2 ; 1.414213562373095
0.35625 ⇒ .35625 ; \frac{57}{160} ; 0.356250 ; 35.625\% ≠ 0.356 ; 0.36 ; 0.3562
4.5 ⇒ 4.5 ; \frac{9}{2} ; 4\frac{1}{2} ; 4 \frac12 ; 9/2 ; 4 1/2 ≠ 4 ; 5 ; 4.49 ; 45 ;
    4 \cdot \frac{1}{2}
3.14 ⇒ 3.14 ; \frac{157}{50} ; 3.140 ≠ \pi ; 3.1 ; 3.141
e ⇒ e ; e^1 ≠ 2.718 ; 2.71828182845905 ; 1
2 ⇒ 2.0 ; 2. ; 2 ; \frac{4}{2} ; \sqrt{4} ; 1.0+1 ; +2 ≠ 1.9999 ; 2.0001 ; -2 ; 2i ;
    1.99999999999999999
\frac{\sqrt{3}}{2} ⇒ \sqrt{3}/2 ; \frac12\sqrt3 ; \sqrt{\frac{3}{4}} ; 0.5\sqrt{3} ≠ 0.866 ;
    0.8660254037844386 ; \frac{\sqrt{3}}{3}
# repeating decimals
0.\overline{3} ⇒ \frac{1}{3} ; 0.\overline{3} ; 0.\overline{33} ; 0.3\overline{3} ; 0.\bar 3 ;
    0.333... ≠ 0.3 ; 0.333 ; 0.\overline{4} ; 3.\overline{3}
\frac{1}{7} ⇒ 0.\overline{142857} ≠ 0.142857 ; 0.\overline{14285}
\frac{1}{6} ⇒ 0.1\overline{6} ; 0.1666\ldots ≠ 0.\overline{16} ; 0.1667 ; 0.16
1 ⇒ 0.\overline{9} ≠ 0.999 ; 0.9
\frac{137}{99} ⇒ 1.\overline{38} ≠ 1.38 ; 1.3\overline{8}
-\frac{2}{3} ⇒ -0.\overline{6} ; \frac{-2}{3} ; \frac{2}{-3} ≠ 0.\overline{6} ; -0.667 ; \frac23
# functions
\frac{1}{2} ⇒ \cos 60^\circ ; \sin 30^\circ ; \cos(60°) ; \sin\frac{\pi}{6} ; \cos \frac{\pi}{3} ;
    \sin(30^{\circ}) ≠ \cos 30^\circ ; \sin 60^\circ ; \cos 60 ; \sin 30 ; \tan 45^\circ
\cos 60^\circ ⇒ \frac12 ; 0.5 ; \sin 30^\circ ≠ \cos 30^\circ ; 60 ; 1
\sqrt{3} ⇒ \tan 60^\circ ; \tan\frac{\pi}{3} ; 2\cos 30^\circ ≠ \tan 30^\circ ; 1.732
\log 2 ⇒ \log 2 ; \log(2) ; \log_{10} 2 ; \frac{1}{2}\log 4 ; log 2 ; \frac{\log 4}{2} ;
    \log_{10}(2) ; log(2) ≠ 0.301 ; 0.30103 ; \log 3 ; \log_2 10 ; 0.6931 ; 2
\ln 2 ⇒ \ln 2 ; \ln(2) ; \log 2 ; \frac{1}{2} \ln 4 ; \log_e 2 ; ln(2) ; -\ln \frac12 ≠ 0.693 ;
    \ln 3 ; \log_2 3
\log_2 8 ⇒ 3 ; \log_2(8) ; \frac{\ln 8}{\ln 2} ; \frac{\log 8}{\log 2} ≠ \log_8 2 ; 4 ; 8
3 ⇒ \log_2 8 ; \log_{10} 1000 ; \sqrt{9} ; \sqrt[3]{27} ; \sqrt[3] {27} ; |-3| ; \left|-3\right|
    ≠ \log_2 9 ; \sqrt{3} ; \sqrt[3]{9} ; |-4|
\frac{\pi}{4} ⇒ \arctan 1 ; \arctan(1) ; \frac14\pi ; pi/4 ; 0.25\pi ≠ 0.785 ; 45 ; \frac{4}{\pi}
e^2 ⇒ e^{2} ; e \cdot e ; \exp(2) ≠ 7.389 ; 2e ; e^3
# sets
\{1,2,3\} ⇒ \{3,2,1\} ; 1,2,3 ; \left\{1,2,3\right\} ; \{1, 2, \frac{6}{2}\} ≠ \{1,2\} ; \{1,2,4\} ;
    (1,2,3) ; [1,2,3] ; 6
\{5\} ⇒ 5 ; \{5\} ≠ \{6\} ; \{5,6\} ; \{\}
\emptyset ⇒ \varnothing ; \emptyset ; \{\} ; ∅ ≠ 0 ; \{0\} ; 1
3 \pmod{5} ⇒ 3 \pmod 5 ; n \equiv 3 \pmod{5} ≠ 2 \pmod{5} ; 3 \pmod{7} ; 3
\{1\pm\sqrt{5},-2\} ⇒ \{-2, 1+\sqrt5, 1-\sqrt5\} ; 1+\sqrt{5}, 1-\sqrt{5}, -2 ≠ \{1\pm\sqrt{5}\} ;
    \{1\pm\sqrt{5}, 2\} ; \{1+\sqrt5,-2\}
1,-2 ⇒ -2,1 ; \{-2,1\} ; x=1,-2 ≠ 1,2 ; -1,2 ; (1,-2)
-2 \text{ or } -12 ⇒ -12,-2 ; -2,-12 ; -2 or -12 ≠ -2 ; 12,2
# matrices
2\begin{pmatrix}1\\2\end{pmatrix} ⇒ \begin{pmatrix}2\\4\end{pmatrix} ≠
    \begin{pmatrix}2\\2\end{pmatrix}
\begin{pmatrix}\frac12&\\1&2\end{pmatrix} ⇒ \begin{pmatrix}0.5&\\1&2\end{pmatrix} ≠
    \begin{pmatrix}0.5&1\\1&2\end{pmatrix}
\begin{pmatrix} 1 & 0 \\ 0 & 3 \end{pmatrix} ⇒ \begin{pmatrix}1&0\\0&3\end{pmatrix} ;
    \begin{bmatrix}1&0\\0&3\end{bmatrix} ; \begin{pmatrix} 1 & 0 \\ 0 & \frac{6}{2} \\ \end{pmatrix}
    ≠ \begin{pmatrix}0&1\\3&0\end{pmatrix} ; \begin{pmatrix}1&0&0&3\end{pmatrix} ;
    \begin{vmatrix}1&0\\0&3\end{vmatrix} ; 3 ; (1,0,0,3)
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} ⇒
    \begin{pmatrix} -\frac13 \\ \frac23 \\ \frac53 \end{pmatrix} ;
    \begin{bmatrix}-1/3\\2/3\\5/3\end{bmatrix} ;
    \begin{pmatrix} -\frac13 \\[4pt] \frac23 \\[-0.3 em] \frac53 \end{pmatrix}
    ≠ \begin{pmatrix} -0.333 \\ 0.667 \\ 1.667 \end{pmatrix} ;
    \begin{pmatrix} -1/3 & 2/3 & 5/3 \end{pmatrix} ; \begin{pmatrix} 1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
\left[\begin{array}{cc}1&2\\3&2+2\end{array}\right] ⇒
    \left[\begin{array}{cc}1&2\\3&4\end{array}\right] ≠
    \left[\begin{array}{cc}1&2\\3&5\end{array}\right]
# words
\text{east} ⇒ east ; East ; \text{East} ; \textbf{east} ; \text{ east } ≠ seat ; west ; eas ; e ;
    easts
ABC ⇒ ABC ; \text{ABC} ≠ BAC ; ACB ; AB
\angle ABC ⇒ \angle ABC ; \angle CBA ≠ \angle ACB ; \angle ABD
\text{(C)} ⇒ C ; (C) ; \text{C} ; \text{(C)} ; \textbf{(C)} ; (\text{C}) ≠ B ; \text{(B)} ; D ; CC
\text{(C)} ⇒ \textbf{(C)}\ 12 ; (C) 12 ; \textbf{(C) }\frac{1}{2} ≠ \textbf{(B)}\ 12 ; 12 ; (C) 12 (B) 3
\textbf{(C)}\ 12 ⇒ C ; \text{(C)} ; (C)~12 ; (C) 12.0 ; (C) $12$ ≠ B ; (B) 12 ; 13 ; (C) 13
\text{Evelyn} ⇒ Evelyn ; evelyn ; \text{Evelyn} ≠ Eve ; Evelyn and Bob ; Bob
even ⇒ \text{even} ; Even ≠ odd ; neve ; event
\text{Yes} ⇒ yes ; Yes ≠ no ; y
A ⇒ A ≠ a ; B
ellipse ⇒ \text{ellipse} ; \text{Ellipse} ≠ circle ; \text{parabola}
# signs, factorials, products
5 ⇒ +5 ; (5) ; \boldsymbol{5} ; \underline{5} ; {5} ; --5 ; |5| ; 5. ; $5$ ; \(5\) ≠ \pm 5 ; 5x ; 5! ;
    -5 ; 5i ; 5e ; 5\pi ; 55 ; \sqrt{5} ; 5^2 ; 1/5 ; 5a ; 5,5 ; <empty>
\pm 5 ⇒ \pm 5 ; \pm5 ; 5, -5 ; -5, 5 ; \{-5,5\} ; x = \pm 5 ; x=5, x=-5 ≠ 5 ; -5 ; \pm 4 ; (5,-5) ;
    0
1 \pm \sqrt{19} ⇒ 1+\sqrt{19}, 1-\sqrt{19} ; 1-\sqrt{19},1+\sqrt{19} ; 1\pm\sqrt{19} ; 1\mp\sqrt{19}
    ≠ 1+\sqrt{19} ; -1\pm\sqrt{19} ; \pm\sqrt{19}
120 ⇒ 5! ; 5 \cdot 4! ; 120 ≠ 5 ; 6! ; 4! ; 5!!
6xy ⇒ 6yx ; 2x \cdot 3y ; 6 x y ; 6\cdot x\cdot y ≠ 6x ; 6x+y ; 6x^y ; 6xyz
2x ⇒ 2 \cdot x ; x+x ; x2 ; 2*x ; x*2 ≠ x^2 ; 2 ; x ; 2+x ; 2y
-5 ⇒ -5 ; − 5 ; -(5) ; -\frac{10}{2} ≠ 5 ; +5 ; \pm 5 ; 5-
x>3 ⇒ 3<x ; x > 3 ; (3,\infty) ≠ [3,\infty) ; x<3 ; x\ge 3 ; 3 ; x=3
10 ⇒ \binom{5}{2} ; \binom{5}{3} ; \frac{5!}{3!2!} ; 2*5 ; (2)(5) ; 2(5) ; (2)5 ; 20(\frac{1}{2})
    ≠ 7 ; 3(5) ; \binom{5}{1} ; 25 ; 2,5 ; 1 0
1,000,000 ⇒ 10^6 ; 1000000 ≠ 1 ; 1,0,0
x^{10} ⇒ x^{10} ; x^5 \cdot x^5 ≠ x^{1}0 ; 10x ; x^9
11,111,111,100 ⇒ 11,\! 111,\! 111,\! 100 ; 11111111100 ≠ 11 ; 11111111101
"""

# of gsm8k
_NUMBERS = r"""
5 ⇒ 5 ; 5.0 ; 5.00 ; \$5 ; $5 ; 5 apples ; 5 cm ; 5cm ; 5kg ; 5\text{ apples} ; 5\% ; 5% ; 5° ;
    5^\circ ; x = 5 ; 2+3=5 ; 5 m ; 5 p.m. ; 5pm ; +5 ; (5) ; about 5 ; 5. ; 5 dollars ; 5/hour ;
    \text{5} ; x \approx 5 ; 5 a day ; Total: 5 ; $5.00 ; 005 ; \textbf{5} ; 5e0 ; \boxed{5} ;
    5-foot ≠ 5x ; 5! ; \pm 5 ; ±5 ; -5 ; 5y ; 5n ; 5i ; 5^2 ; 5_6 ; 1/5 ; \frac{5}{1}2 ; 4=5 ;
    2+2=5 ; 5, 6 ; 5 or 6 ; 5 million ; 5e3 ; 5\pi ; \sqrt{5} ; f(5) ; -(5) ; minus 5 ; x_5 ; 5(2) ;
    5*2 ; 5+x ; x-5 ; 5xy ; 5\cdot x ; 5k ; 5 thousand ; 2^5 ; |x|5 ; 5'2 ; log 5 ; 5 x ; <empty> ;
    five
7 ⇒ x = 007 ; 3 + 4 = 7 ≠ 3 4 ; x + 7 ; \frac{1}{x} ; none
0 ⇒ -0 ≠ x
72 ⇒ Tom and Ann have 72 apples ; The two-day total is 72 ; [72] ; **72** ; **$72** ; `72` ;
    the day/night total: 72 ; 72 cats and dogs ≠ 71 cats
1200 ⇒ 1,200 ; 1\,200 ; 1 200 dollars ; \$1~200 ; \boldsymbol{1200} ; 1200.00 ; 1.2e3 ;
    1.2\times10^3 ; 1{,}200 ; $1,200 per week ; 1200 km/h ≠ 12,00 ; 1 20 0 ; 12 00 ; 1.2 ; 120 ; 1200x ; 1.2e4
24 ⇒ 24 cm^2 ; 24\text{ cm}^2 ; 24 \text{ m}^{3} ; 24 m² ; 24 square feet ; 24ft^2. ≠ 24x^2 ;
    24 y^{2} ; 24^2 ; 24\pi^2 ; 24 cm^4 ; 2 cm^2 ; 24ab^2 ; 24 dx^2
-3 ⇒ -3 ; −3 ; -\$3 ; -$3 ; $-3 ; -3.0 ≠ 3 ; --3 ; -3x ; \pm 3
0.5 ⇒ .5 ; 0.50 ≠ 1/2x ; 5 ; 0.55
1200.5 ⇒ 1,200.50 dollars ; 1,200.5 km ≠ 1,200 ; 1,2 ; x - 1200.5
"""


def _parse_pairs(text: str) -> list[tuple[str, str, bool]]:
    pairs = []
    for line in re.sub(r"\n {4}", " ", text.strip()).splitlines():
        if line.startswith("#"):
            continue
        expected, _, answers = line.partition(" ⇒")
        for right, group in zip((True, False), answers.split(" ≠"), strict=True):
            words = group.strip().replace("<empty>", "").split(" ; ") if group else []
            pairs += [(expected, answer, right) for answer in words]
    return pairs


PAIRS, NUMBERS = _parse_pairs(_PAIRS), _parse_pairs(_NUMBERS)
