import os
import signal
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from areal.extensions.math import final_answer, limits, math_answers
from areal.rewards.functions import RewardError
from areal.rewards.lookup import resolve

BY_KIND = Path(__file__).with_name("math_answers_by_kind.txt").read_text().splitlines()
GSM8K = Path(__file__).with_name("gsm8k_test_answers.txt").read_text().splitlines()[2:]

# The row's answer ~ a completion that gives it.
RIGHT = r"""
72 ~ \boxed{72}
72 ~ \boxed{72.0}
72 ~ \boxed{$72}
72 ~ #### 72
72 ~ #### 72 clips
72 ~ #### **72**
72 ~ The answer is 72.
72 ~ The answer is: $72$.
72 ~ **Final Answer: 72**
72 ~ Final answer: \(72\)
72 ~ The final answer to the question is $\boxed{72}$. I hope it is correct.
72 ~ Thus he sold 72 clips.
72 ~ Thus, the number of clips is **72**.
72 ~ 48 + 24 = 72
72 ~ It is $72$
72 ~ so x = 72
72 ~ So she earned $72 in all.
72 ~ She has $18 and then earns $54 more, so $72 in total.
1,234 ~ \boxed{1234}
1234 ~ \boxed{1,234}
1234 ~ \boxed{1{,}234}
1234 ~ \boxed{1,\!234}
1234567 ~ The answer is 1,234,567.
1234 ~ \boxed{1\,234}
-12345678 ~ \boxed{-12\;345~678 \text{ km}}
1\,234 ~ \boxed{1234}
\frac{1000}{3} ~ \boxed{\frac{1\,000}{3}}
72 ~ So $x = 72.$
72 ~ \[x = 72 .\]
72 ~ \boxed{72.}
72. ~ \boxed{72}
$2\sqrt{2}.$ ~ \boxed{2\sqrt{2},}
Paris ~ \boxed{\text{Paris.}}
1234.5 ~ \boxed{1,234.50}
1/2 ~ \boxed{0.5}
\frac{1}{2} ~ \boxed{\frac12}
\frac{1}{2} ~ \boxed{\dfrac{1}{2}}
\frac{1}{2} ~ \boxed{1/2}
\frac{1}{2} ~ \boxed{\frac{2}{4}}
\frac{1}{2} ~ \boxed{.5}
-\frac{1}{2} ~ \boxed{\frac{-1}{2}}
-\frac{1}{2} ~ \boxed{-\frac{1}{2}}
\frac{3}{2} ~ \boxed{1\frac{1}{2}}
\frac{3}{2} ~ \boxed{1 1/2}
1.5 ~ The answer is 1 1/2.
-3 1/2 ~ \boxed{-3.5}
1\frac{1}{2} ~ \boxed{1.5}
-\frac{7}{2} ~ \boxed{-3\frac{1}{2}}
1/3 ~ \boxed{0.333333}
\frac{1}{12} ~ \boxed{0.0833333333333333}
2/3 ~ \boxed{0.6666667}
0.5 ~ \boxed{50\%}
50\% ~ \boxed{50}
50\% ~ \boxed{0.5}
50% ~ \boxed{50 \text{ percent}}
50 ~ The answer is 50%.
12.5\% ~ \boxed{\frac{1}{8}}
5 ~ \boxed{5 \text{ cm}}
5 \text{ cm} ~ \boxed{5}
5 \text{ cm} ~ \boxed{5 \text{ centimeters}}
5 \text{ cm}^2 ~ \boxed{5\,\mathrm{cm}^2}
5 cm ~ \boxed{5cm}
25\pi ~ \boxed{25\pi\text{ square inches}}
$5 ~ 5 dollars
5 ~ \boxed{\$5}
\$5 ~ \boxed{5\text{ dollars}}
18.90 ~ \boxed{\$18.9}
40 ~ \boxed{40^\circ}
40^\circ ~ \boxed{40\text{ degrees}}
60 ~ 60 miles per hour
60 ~ \boxed{60\text{ km/h}}
300000 ~ \boxed{3 \times 10^5}
3 \times 10^{5} ~ \boxed{3\cdot 10^{5}}
3\times10^{-4} ~ \boxed{0.0003}
1500 ~ \boxed{1.5E3}
-5 ~ \boxed{-5}
-5 ~ \boxed{−5}
5 ~ \boxed{+5}
-5 ~ The answer is -5
2\pi ~ \boxed{2π}
2\pi ~ \boxed{\pi \cdot 2}
\sqrt{8} ~ \boxed{2\sqrt{2}}
\frac{1}{\sqrt{2}} ~ \boxed{\frac{\sqrt{2}}{2}}
\sqrt{2} ~ \boxed{1.41421356}
\pi ~ \boxed{3.14159265}
3+2i ~ \boxed{2i+3}
x+1 ~ \boxed{1+x}
x^2-1 ~ \boxed{(x-1)(x+1)}
\frac{x+2}{7} ~ \boxed{\frac{x}{7}+\frac{2}{7}}
\tan^2(y)+1 ~ \boxed{\sec^2(y)}
2x+1 ~ \boxed{f(x)=2x+1}
y=2x+1 ~ \boxed{2x+1}
e^{2x} ~ \boxed{(e^x)^2}
x = 5 ~ \boxed{5}
5 ~ \boxed{x = 5}
x=5 ~ \boxed{x = 5.0}
5 ~ \boxed{2+3=5}
y = 2x + 3 ~ \boxed{y=3+2x}
34x+45y-20z+100=0 ~ \boxed{-34x-45y+20z-100=0}
x > 5 ~ \boxed{5 < x}
x \ge 2 ~ \boxed{x\geq 2}
(0, 1) ~ \boxed{(0,1)}
(1, \frac{9}{2}) ~ \boxed{(1,4.5)}
(3, \frac{\pi}{2}) ~ \boxed{\left(3,\frac{\pi}{2}\right)}
[0, 1) ~ \boxed{[0,1)}
[-2, 7] ~ \boxed{x \in [-2,7]}
[-2,7] ~ \boxed{-2\le x\le 7}
(5, \infty) ~ \boxed{x > 5}
[-\sqrt{2},\sqrt{2}] ~ \boxed{-\sqrt{2} \le x \le \sqrt{2}}
\varnothing ~ \boxed{\emptyset}
\frac{1}{2}x ~ \boxed{x/2}
2 x ~ \boxed{x \cdot 2}
(-\infty, 5] ~ \boxed{\left(-\infty,5\right]}
(-\infty,0)\cup(0,\infty) ~ \boxed{(0,+\infty) \cup (-\infty,0)}
0 < x < 1 ~ \boxed{(0,1)}
\{1,2,3\} ~ \boxed{\{3,2,1\}}
\{1,2\} ~ \boxed{1, 2}
1, 2 ~ \boxed{2, 1}
1, 2 ~ \boxed{1} and \boxed{2}
1, 2 ~ x = \boxed{1} or x = \boxed{2}
1 \text{ and } 2 ~ \boxed{1,2}
x=1, x=2 ~ \boxed{x=1 \text{ or } x=2}
x=1,y=2 ~ \boxed{y=2,x=1}
\pm 2 ~ \boxed{2, -2}
1 \pm \sqrt{2} ~ \boxed{1+\sqrt2, 1-\sqrt2}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ \boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}
\begin{pmatrix} 0.5 \\ -1 \end{pmatrix} ~ \boxed{\begin{pmatrix}\frac12\\-1\\\end{pmatrix}}
\begin{pmatrix}-\frac{7}{4}&-2\\4&1\end{pmatrix} ~ \boxed{(\begin{pmatrix}-\frac{7}{4}&-2\\4&1\\\end{pmatrix})}
A ~ \boxed{A}
A ~ \boxed{\text{(A)}}
east ~ \boxed{\text{east}}
\text{east} ~ \boxed{East}
Yes ~ \boxed{\text{yes}}
3:2 ~ \boxed{3:2}
2x ~ \boxed{x\cdot 2}
ab ~ \boxed{ba}
\frac{2^{2005}+1}{3 \cdot 2^{2006}} ~ \boxed{\frac{2^{2005}+1}{3 \cdot 2^{2006}}}
\frac{n(n+1)}{2} ~ \boxed{\frac{n^2+n}{2}}
\binom{5}{2} ~ \boxed{10}
\ln 2 ~ \boxed{-\ln\frac{1}{2}}
\$1,200 ~ \boxed{1200}
1 ~ <think>first \boxed{3}</think> so \boxed{1}
so it is \boxed{\sqrt{8}} ~ \boxed{2\sqrt{2}}
(B) ~ \boxed{B}
C ~ so it is \boxed{\text{C}}
Evelyn ~ \boxed{Evelyn}
\text{June 20} ~ \boxed{\text{june 20}}
Peter won ~ \boxed{\text{Peter won}}
(4,1),(1,4) ~ \boxed{(1,4),(4,1)}
(2,5),(7,3) ~ \[\boxed{(7,3)} \text{ and } \boxed{(2,5)}\]
(x,y)=(4,7) ~ \boxed{(4,7)}
n=4,k=9 ~ \boxed{4, 9}
(4,7) ~ \boxed{(x,y)=(4,7)}
(-3,8] ~ \[x \in \boxed{(-3,8]}\]
-3<x<8 ~ \boxed{(-3,8)}
23,\! 456 ~ \boxed{23456}
3 \text{ and } 5 ~ $\boxed{5}$ and $\boxed{3}$
-4;-3;2 ~ \boxed{\{2,-3,-4\}}
$\frac{3}{4}$ ~ \boxed{0.75}
\(x^2\) ~ \boxed{x \cdot x}
The area is $6\pi$. ~ \boxed{6\pi}
First 3, then 4 more. #### 7 ~ \boxed{7}
72 ~ So \boxed{72}, and the final answer is $5$ more.
72 ~ \boxed{72}, or so. The final answer is 72. I hope it is correct.
72 ~ \boxed{72} is what goes into \boxed{}.
72 ~ 48 + 24 = 72⏎A: 72
72 ~ So $3 + $69 = $72.
72 ~ The answer is 72 (not 73).
72 ~ The answer is not 73 but 72.
72 ~ **Final Answer**⏎⏎72
72 ~ Final answer: the number of clips is 72.
72 ~ 12 x 6 = 72
1/3 ~ \boxed{0.33}
\frac{8}{3} ~ \boxed{2.6667}
(\frac{3}{5},\frac{8}{3}] ~ \boxed{(0.6,2.667]}
\begin{pmatrix}\frac{1}{3}\\ \frac{1}{5}\end{pmatrix} ~ \boxed{\begin{pmatrix}0.33\\0.2\end{pmatrix}}
1,22 ~ 1.22
1,22 ~ \boxed{1, 22}
1000.99 ~ 1000,99
1000 ~ 1 000
x < 1 ~ \boxed{-x > -1}
x = \frac{-1 \pm \sqrt{13}}{4} ~ \boxed{\frac{\sqrt{13} - 1}{4}, \frac{-1-\sqrt{13}}{4}}
1-\frac{1}{\mathrm{e}} ~ \boxed{1-\frac{1}{e}}
\\boxed{W(n) = 1 \\text{ and } W(n) = -1 ~ W(x)=1orW(x)=-1
4.123105625617661 ~ \boxed{\sqrt{17}}
"""
# The row's answer ~ a completion that does not give it.
WRONG = r"""
72 ~ \boxed{73}
1\,000 ~ \boxed{0}
12 ~ \boxed{1\,2}
72 ~ \boxed{}
42 ~ \boxed{42} no, \boxed{}
72 ~ \boxed{
72 ~ ####
72 ~
72 ~ I do not know
72 ~ \boxed{18, 72}
72 ~ -72
72 ~ \boxed{-72}
72 ~ \boxed{7.2}
72 ~ \boxed{720}
72 ~ \boxed{72x}
72 ~ \boxed{72} no, \boxed{73}
72 ~ 72 or 73
72 ~ \boxed{72 \text{ or } 73}
1234 ~ \boxed{1,235}
1234 ~ \boxed{1, 234}
1000000 ~ \boxed{1000001}
0.5 ~ \boxed{50}
50 ~ \boxed{0.5}
50\% ~ \boxed{5}
50\% ~ \boxed{0.05}
50\% ~ \boxed{5000}
\frac{1}{2} ~ \boxed{\frac{1}{3}}
\frac{1}{2} ~ \boxed{2}
\frac{1}{2} ~ \boxed{-\frac12}
1/3 ~ \boxed{0.34}
1/2 ~ \boxed{1 1/2}
1 1/2 ~ \boxed{1 1/3}
[-2,7] ~ \boxed{-2 < x < 7}
[-\sqrt{2},\sqrt{2}] ~ \boxed{x^2 \le 2}
100/3 ~ \boxed{33.3}
33.3 ~ \boxed{\frac{100}{3}}
\frac{3}{2} ~ \boxed{1\frac{1}{3}}
3.14 ~ \boxed{\pi}
\pi ~ \boxed{3.14}
\pi ~ \boxed{\frac{22}{7}}
5 ~ \boxed{6 \text{ cm}}
300000 ~ \boxed{3\times10^4}
1500 ~ \boxed{1.5e4}
1024 ~ \boxed{2^{11}}
1024 ~ \boxed{210}
25 ~ \boxed{5^3}
5^2 ~ \boxed{52}
25 ~ \boxed{5²0}
2\pi ~ \boxed{2}
2\pi ~ \boxed{\pi^2}
2\sqrt{2} ~ \boxed{2\sqrt{3}}
3+2i ~ \boxed{3-2i}
2i ~ \boxed{-2i}
x+1 ~ \boxed{x-1}
x+1 ~ \boxed{y+1}
x ~ \boxed{|x|}
\sqrt{x^2} ~ \boxed{x}
e^{-50} ~ \boxed{e^{-60}}
x = 5 ~ \boxed{y = 5}
x = 5 ~ \boxed{x = 6}
5 ~ \boxed{x = 6}
2x+3y=7 ~ \boxed{7}
2x+3y=7 ~ \boxed{2x+3y=8}
y=2x+1 ~ \boxed{y=2x-1}
x > 5 ~ \boxed{x < 5}
x > 5 ~ \boxed{x \ge 5}
x > 5 ~ \boxed{5}
(0,1) ~ \boxed{[0,1]}
(0,1) ~ \boxed{[0,1)}
(0,1) ~ \boxed{(1,0)}
(1,2) ~ \boxed{(1,2,3)}
(1,2) ~ \boxed{1}
[0,1) ~ \boxed{[0,2)}
D = (0, 1) ~ \boxed{D = (0, 1.5)}
n=2, 3, 4 ~ \boxed{n=1, 2, 3}
(-\infty,0)\cup(0,\infty) ~ \boxed{(-\infty,\infty)}
\{1,2,3\} ~ \boxed{\{1,2\}}
\{1,2\} ~ \boxed{\{1,2,3\}}
1331 and 1728 ~ \boxed{1728}
19, 46, \text{ and } 82 ~ \boxed{21, 36, and 82}
\pm 2021 ~ \boxed{2021}
2021 ~ \boxed{\pm 2021}
3:2 ~ \boxed{2:3}
\frac{1}{2^{99}} ~ \boxed{\frac{1}{2^{98}}}
3x-1y+13=0 ~ \boxed{3x + 4y + 14=0}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ \boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ \boxed{\begin{pmatrix}1&2&3&4\end{pmatrix}}
A ~ \boxed{B}
A ~ \boxed{A, B}
A ~ \boxed{(A)(B)}
(A) ~ The answer is (C).
A ~ A triangle has three sides
east ~ \boxed{seat}
east ~ \boxed{west}
Yes ~ \boxed{No}
Evelyn ~ The answer is Briana.
June 20 ~ \boxed{20}
June 20 ~ June 21
2x ~ \boxed{x^2}
72 ~ \boxed{__import__('os').getpid()}
72 ~ \boxed{72 = 73}
\frac{x}{10^{20}} ~ \boxed{\frac{x}{10^{21}}}
1234567.0 ~ \boxed{1234567.1}
\infty ~ \boxed{-\infty}
\infty ~ \boxed{100}
5 ~ \boxed{5 + 5}
-3 ~ \boxed{5-3x}
72 ~ The answer is 73, not 72.
\binom{5}{2} ~ \boxed{\frac{5}{2}}
\sqrt{2} ~ \boxed{1.41422}
west ~ \boxed{stew}
5 ~ 5 or \boxed{2√2}
5 ~ The total is 5. \boxed{\frac{}
(4,1),(1,4) ~ \boxed{(1,4),(4,2)}
(x,y)=(4,7) ~ \boxed{(7,4)}
23,\! 456 ~ \boxed{23,\! 457}
3 \text{ and } 5 ~ $\boxed{5}$ and $\boxed{4}$
1/3 ~ \boxed{0.3}
1/3 ~ \boxed{0.330}
1/8 ~ \boxed{0.13}
1/300 ~ \boxed{0.00}
\sqrt{2} ~ \boxed{1.41}
1,22 ~ 1.23
9 ~ Answer $ ⏎ 9 ⏎ $
9 ~ Answer \( ⏎ 9 ⏎ \)
72 ~ \boxed{72}. The final answer is 73. I hope it is correct.
73 ~ 72 or 73
72 ~ 70 71 72
72 ~ \boxed{70, 71, 72}
72 ~ 70, \boxed{71}, \boxed{72}
"""
# The row's answer ~ what leaves its arithmetic, or its equation, to the reader.
UNFINISHED = r"""
3 ~ The problem is 4 - 1
3 ~ The answer is 4 - 1
3 ~ 4 - 1 =
1 ~ The answer to 2 - 1 = ?
7 ~ The answer is 7 * 1 = x
72 ~ I do not know 12*6
72 ~ It is $12 \cdot 6$
72 ~ #### 12*6
72 ~ \boxed{12*6}
72 ~ \boxed{12 \times 6}
72 ~ \boxed{144/2}
72 ~ \boxed{\frac{144}{2}}
72 ~ \boxed{70+2}
72 ~ \boxed{-(-72)}
72 ~ \boxed{--72}
72 ~ \boxed{72^1}
72 ~ \boxed{|-72|}
72 ~ \boxed{\gcd(144, 216)}
72 ~ \boxed{\lceil 71.5 \rceil}
72 ~ \boxed{x = 12*6}
72 ~ \boxed{x = 72 + 0}
72 ~ \boxed{72 = 12*6}
18 ~ \boxed{12(6)}
15 ~ \boxed{{5}{3}}
15 ~ \boxed{5{3}}
3 ~ \boxed{4 - 1 \approx 0}
3 ~ \boxed{4 - 1 ≈ 0}
30 ~ \boxed{3 \times 10^1}
18 ~ \boxed{12\,6}
1024 ~ \boxed{2^{10}}
120 ~ \boxed{5!}
10 ~ \boxed{\binom{5}{2}}
4 ~ \boxed{\sqrt{16}}
2 ~ \boxed{\log_2 4}
-2 ~ \boxed{\det\begin{pmatrix}1&2\\3&4\end{pmatrix}}
0.5 ~ \boxed{\frac{3-2}{2}}
\frac{1}{2} ~ \boxed{1 - \frac{1}{2}}
1, 2 ~ \boxed{3-2, 1+1}
(1, 2) ~ \boxed{(3-2, 2)}
\begin{pmatrix}6&8\end{pmatrix} ~ $\begin{pmatrix}1&2\end{pmatrix} + \begin{pmatrix}5&6\end{pmatrix}$
\begin{pmatrix}1&0\\0&1\end{pmatrix} ~ $\begin{pmatrix}1&0\\0&1\end{pmatrix} \begin{pmatrix}1&0\\0&1\end{pmatrix}$
x = 2 ~ \boxed{2x + 3 = 7}
x = 2 ~ \boxed{2x = 4}
2 ~ \boxed{4 = 2x = 2}
x > 2 ~ \boxed{2x > 4}
\frac{\pi}{4} ~ \boxed{\arctan 1}
\frac{n(n+1)}{2} ~ \boxed{\sum_{k=1}^n k}
\frac{x^2}{2} ~ \boxed{\int x \, dx}
3.14159265 ~ \boxed{\arccos(-1)}
"""
# What the prompt asks ~ the row's answer ~ a completion ~ its score.
PROMPTED = r"""
How many are 5 + 0? ~ 5 ~ 5 ~ 1
How many are 5 + 0? ~ 5 ~ It is 5. ~ 0
How many are 5 + 0? ~ 5 ~ The answer is 5. ~ 1
How many are 5 + 0? ~ 5 ~ \boxed{5} ~ 1
How many are 5 + 0? ~ 5 ~ #### 5 ~ 1
How many are 5 + 0? ~ 5 ~ A: 5 ~ 1
How many are 5 + 0? ~ 5 ~ 5 + 0 = 5 ~ 1
How many are 5 + 0? ~ 5 ~ The answer to: how many are 5 + 0? ~ 0
Which is more, 3 or 5.0? ~ 5 ~ The answer: more is 3, and of the two it is 5 ~ 0
Which is more, 3 or 5,000? ~ 5000 ~ 5000 is more ~ 0
If x = 5, what is x + 0? ~ 5 ~ We have x = 5 ~ 0
If x = 15, what is x - 10? ~ 5 ~ We have x = 5 ~ 1
Simplify 2/4. ~ 1/2 ~ \boxed{\frac{2}{4}} ~ 0
Simplify 2/4. ~ 1/2 ~ \boxed{\frac{3}{6}} ~ 1
Take 1/2 or 1/3. ~ \frac{1}{2} ~ \boxed{1/2} ~ 1
What is the LCM of 32, 4? ~ 32 ~ The answer is 32, 4 ~ 0
What is the LCM of 32, 4? ~ 32 ~ The answer is 32, as 4 divides it. ~ 1
Add $(1 - 2i) + (3 + i)$. ~ 4 - i ~ \boxed{((1 - 2i) + (3 + i))} ~ 0
Add $(1 - 2i) + (3 + i)$. ~ 4 - i ~ \boxed{-i + 4} ~ 1
Expand $(x-1)(x+1)$. ~ x^2-1 ~ \boxed{((x-1)(x+1))} ~ 0
Expand $(x-1)(x+1)$. ~ x^2-1 ~ \boxed{(x-1)(x+1) \approx 1} ~ 0
Write 7/2 as a decimal. ~ 3.5 ~ \boxed{\frac{7}{2}} ~ 0
Write 3.5 as a fraction. ~ \frac{7}{2} ~ \boxed{\frac{7}{2}} ~ 1
Simplify $\sqrt{8}$. ~ 2\sqrt{2} ~ \boxed{x = \sqrt{8}} ~ 0
Simplify $\sqrt{8}$. ~ 2\sqrt{2} ~ So $x = \sqrt{8}$ ~ 0
Simplify $\sqrt{8}$. ~ 2\sqrt{2} ~ \boxed{\sqrt{8}} ~ 0
Simplify $\sqrt{8}$. ~ 2\sqrt{2} ~ It is $2\sqrt{2}$. ~ 1
Simplify $\sqrt{8}$. ~ 2\sqrt{2} ~ It is $\sqrt 8$. ~ 0
Expand $(x-1)(x+1)$. ~ x^2-1 ~ \boxed{(x - 1)(x + 1)} ~ 0
Expand $(x-1)(x+1)$. ~ x^2-1 ~ \boxed{x^{2} - 1} ~ 1
Is it $x^2-1$ or $x^2$? ~ x^2-1 ~ \boxed{x^{2} - 1} ~ 1
What is $\sqrt{17}$? ~ 4.123105625617661 ~ \boxed{\sqrt{17}} ~ 0
Write $3 \times 10^5$ out. ~ 300000 ~ \boxed{3 \times 10^{5}} ~ 0
Who won, Ann or Bo? ~ Ann ~ \boxed{Ann} ~ 1
(A) 3 (B) 5 ~ \text{(B)} ~ \boxed{B} ~ 1
"""
HOSTILE = {
    "nested braces": "\\boxed{" * 20_000,
    "nested parentheses": "\\boxed{" + "(" * 140 + "1" + ")" * 140 + "}",
    "nested fractions": "\\boxed{" + "\\frac{1}{" * 25 + "2" + "}" * 26,
    "nested roots": "\\boxed{" + "\\sqrt{" * 30 + "x" + "}" * 31,
    "a tower of powers": "\\boxed{9^{9^{9^{9}}}}",
    "a tower below a sum": "\\boxed{\\dfrac{5^{\\left(5^{\\left(5^{\\left(5^5\\right)}\\right)} - 4\\right)} - 5}{16}}",
    "powers in Python": "9**9**9**9",
    "a power of ten": "\\boxed{10^{10^{10}}}",
    "a factorial": "\\boxed{(10^9)!}",
    "a factorial of a factorial": "\\boxed{9!!!!!}",
    "a sum without end": "\\boxed{\\sum_{k=1}^{10^{12}} \\sin(k^k)}",
    "a large exponent in science": "\\boxed{1e999999999}",
    "a large binomial": "\\boxed{\\binom{10^{9}}{10^{8}}}",
    "a power of a sum": "\\boxed{(x+y+z)^{10^{5}}}",
    "a long numeral": "1" * 100_000,
    "a long product": "\\boxed{" + "9^{999}" * 40 + "}",
    "a long sum": "\\boxed{" + "+".join(f"x_{i}^{i}" for i in range(40)) + "}",
    "a giant matrix": "\\boxed{\\begin{pmatrix}" + "1&" * 50_000 + "\\end{pmatrix}}",
    "a power of a matrix": "\\boxed{\\begin{pmatrix}1&1\\\\1&0\\end{pmatrix}^{10^{10}}}",
    "many boxes": "\\boxed{1} and " * 10_000,
    "many dollars": "$" * 100_000,
    "many answers": "answer " * 20_000,
    "many hashes": "#" * 100_000,
    "spaces": "\\boxed{" + " " * 100_000 + "}",
    "null bytes": "\\boxed{1\x008}",
    "surrogates": "\\boxed{\ud800}",
    "other digits": "\\boxed{\u0661\u0668}",
    "code": "\\boxed{__import__('os').abort()}",
    "code in words": "\\boxed{\\text{__import__('os').abort()}}",
    "an open environment": "\\boxed{\\begin{pmatrix}}",
    "no base": "\\boxed{^^^}",
    "zero divided": "\\boxed{\\frac{1}{0}}",
    "a pole": "\\boxed{0^{-1}}",
}


def pairs(table):
    return [tuple(part.strip().replace("⏎", "\n") for part in line.split(" ~")) for line in table.strip().splitlines()]


@pytest.fixture(scope="module")
def score():
    reward = resolve("math").function
    return lambda completion, answer: reward("", completion, {"answer": answer})


@pytest.fixture
def no_child(monkeypatch):
    def refuse(question):
        raise AssertionError("math-verify was asked")

    monkeypatch.setattr(math_answers, "limited", refuse)


@pytest.fixture
def here(monkeypatch):
    """Asks math-verify in this process, where its parser keeps what it learns: that is faster."""
    monkeypatch.setattr(math_answers, "limited", lambda question: question())


@pytest.mark.parametrize(("gold", "completion"), pairs(RIGHT))
def test_the_same_answer_in_another_notation_scores_one(score, here, gold, completion):
    assert score(completion, gold) == 1.0


@pytest.mark.parametrize(("gold", "completion"), pairs(WRONG))
def test_another_answer_scores_zero(score, here, gold, completion):
    assert score(completion, gold) == 0.0


@pytest.mark.parametrize("line", [line for line in BY_KIND if line[0] in "+-"])
def test_the_pairs_of_each_kind_score_one_if_right_and_zero_if_wrong(score, here, line):
    """A line is `+ the row's answer ~ a completion that gives it`, or `-` and one that does not."""
    ((gold, completion),) = pairs(line[2:])
    assert score(completion, gold) == float(line[0] == "+")


@pytest.mark.parametrize(("gold", "completion"), pairs(UNFINISHED))
def test_what_is_still_to_be_worked_out_scores_zero_though_it_equals_the_answer(score, here, gold, completion):
    assert score(completion, gold) == 0.0


@pytest.mark.parametrize(("prompt", "gold", "completion", "expected"), pairs(PROMPTED))
def test_the_prompt_said_again_scores_zero(here, prompt, gold, completion, expected):
    assert resolve("math").function(prompt, completion, {"answer": gold}) == float(expected)


@pytest.mark.parametrize(
    "form", ["{}", "{} =", "The problem is {}", "I do not know {}", "The answer is {}", "\\boxed{{{}}}"]
)
def test_the_sums_of_smollm2_said_again_score_zero_and_their_answers_one(here, form):
    import reasoning_gym

    sums = reasoning_gym.create_dataset("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=50)
    reward = resolve("math").function
    for row in sums:
        words = row["question"].rpartition(":")[2].strip(" =")
        assert reward(row["question"], form.format(words), row) == 0.0
        assert reward(row["question"], row["question"], row) == 0.0
        assert reward(row["question"], f"{words} = {row['answer']}", row) == 1.0


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_completion_scores_zero(score, name, monkeypatch):
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.1)
    assert score(HOSTILE[name], "19") == 0.0


# --- answers of rows

UNREADABLE = [
    "",
    "\\boxed{",
    "\\frac{1}{",
    "x^2 +* 3",
    "\\frac{1}{0}",
    "1, 2, \\ldots, n",
    "2**10",
    "(" * 200 + "1" + ")" * 200,
]


@pytest.mark.parametrize("gold", UNREADABLE)
def test_a_row_whose_answer_cannot_be_read_is_an_error_whatever_the_completion(score, gold, monkeypatch):
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.5)
    for completion in ("\\boxed{18}", "I do not know", gold):
        with pytest.raises(RewardError, match="cannot read the row's answer"):
            score(completion, gold)


def test_the_answers_that_cannot_be_read_are_told_apart_from_the_others(monkeypatch):
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.5)
    readable = ["72", "#### 72", "x+1", "\\boxed{\\pi}", "Paris"]
    assert math_answers.unreadable([*readable, *UNREADABLE[:4], *readable]) == UNREADABLE[:4]
    assert math_answers.unreadable(readable) == math_answers.unreadable([]) == []


def test_plain_numbers_need_no_check(no_child):
    assert math_answers.unreadable(["72", "5 + 2 = 7\n#### 1,072", "-0.5"]) == []


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": []}, {"answer": ["1", None]}])
def test_a_row_without_an_answer_is_an_error(row):
    with pytest.raises(RewardError, match="no answer"):
        resolve("math").function("", "1", row)


def test_a_number_is_an_answer(score):
    assert score("#### 18", 18) == score("#### 0.5", 0.5) == score("#### 27", 27.0) == 1.0
    assert score("\\boxed{0.00001}", 1e-5) == 1.0
    assert score("\\boxed{0.00002}", 1e-5) == 0.0


def test_of_several_answers_one_suffices(score):
    for golds in (["3", "5"], ["x+1", "5"], [3, 5.0]):
        assert score("\\boxed{5}", golds) == 1.0
        assert score("\\boxed{4}", golds) == 0.0
    assert score("\\boxed{1+x}", ["5", "x+1"]) == 1.0
    with pytest.raises(RewardError, match="cannot read"):
        score("\\boxed{5}", ["5", "x^2 +* 3"])


def test_solutions_stand_in_for_an_answer():
    solutions = ["As $2x=6$, it is \\boxed{3}.", "Or \\boxed{-3}."]
    for row in ({"solutions": solutions}, {"answer": None, "solutions": solutions}, {"answer": solutions}):
        assert [resolve("math").function("", f"\\boxed{{{n}}}", row) for n in (3, -3, 2)] == [1.0, 1.0, 0.0]


# --- plain numbers, without math-verify


@pytest.mark.parametrize(
    "completion",
    [
        "72",
        "48 + 24 = 72\n#### 72",
        "#### Step 3\n18\n#### 72\n",
        "\\boxed{72}",
        "She has $18, and so \\boxed{72} clips. That is all (for now)!",
        "As $x = 18$, $\\boxed{72}$ is it.",
        "First\n$$x = 18$$ and then\n$$\n\\boxed{72}\n$$",
        "As \\(x = 18\\), it is \\(\\boxed{72}\\).",
        "First\n\\[ x = 18 \\]\nand then\n\\[\n\\boxed{72}\n\\]",
        "**Final answer: \\boxed{72}**",
    ],
)
def test_a_number_at_the_end_is_compared_without_math_verify(score, no_child, completion):
    assert score(completion, "72") == score(completion, "#### 72") == score(completion, ["5", "72.0"]) == 1.0
    assert score(completion, "73") == 0.0


# Where a text gives its answer ~ the answer, as LaTeX.
GIVEN = r"""
$\boxed{72}$ percent ~ 72\%
\(\boxed{28}\) \% ~ 28\%
\boxed{7} and \boxed{72} ~ 7, 72
\boxed{7} no, \boxed{72} ~ 72
\boxed{7}, so $x = \boxed{72}$ ~ 72
\boxed{\boxed{72}} ~ {72}
\boxed{\left\{1\right\}} ~ \left\{1\right\}
\fbox{72} ~ 72
so \boxed{7 ~ 7
\boxed{} is the place. It is $x$. ~ x
The answer is $x$ and $y$. ~ x, y
The answer is $x$. We saw $y$. ~ x
The answer is x = 72. ~ 72
The answer, in clips, is 72. ~ 72
The answers are 7 or 72. ~ 7, 72
Answer: the clips of April (48) and May are 72. Of these 24 are red. ~ 72
The answer is easy. Add 2 to 70 ~ 70
#### Step 3: Add⏎It is 72. ~ 72
#### Answer: 72 ~ 72
She pays $18 and has $72 left. ~ 72
- 72 ~ 72
about 72% of all ~ 72\%
1.5e3 ~ 1.5e3
\frac{1}{3} cup ~ \frac{1}{3}
1 1/2 cups ~ 1 1/2
10,000.5€ ~ 10000.5
2,5 ~ 2.5
−5 ~ -5
"""
NOT_GIVEN = [
    "",
    "I do not know",
    "x72",
    "72 =",
    "4 - 1",
    "12*6",
    "12 x 6",
    "12 times 6",
    "70 71 72",
    "x - 72",
    "2^10",
    "So $18 - $5",
    "The answer is $18 - $5",
    "The answer is 7 +",
    "$ \n72\n$",
]


@pytest.mark.parametrize(("text", "answer"), pairs(GIVEN))
def test_an_answer_is_found_where_it_is_given_as_one(text, answer):
    assert final_answer.extract(text) == answer


@pytest.mark.parametrize("text", NOT_GIVEN)
def test_a_text_without_a_number_or_formula_at_its_end_gives_no_answer(text):
    assert final_answer.extract(text) is None


NUMBERS = st.one_of(
    st.integers(-200, 200).map(str),
    st.integers(-(10**9), 10**9).map(lambda n: f"{n:,}"),
    st.decimals(-1000, 1000, places=2).map(str),
    st.decimals(-10, 10, places=6).map(lambda n: f"{n:f}"),
    st.sampled_from(["0", "-0", "0.0", "7.0", "0.000001", "-0.000001", "999,999.5"]),
)
PIECES = (
    "$ $$ \\[ \\] \\( \\) [ ] ( ) { } \\{ \\$ \\ \\\\ , . * ** = % \\% # #### <think> | ^2 - -3 5 $5 x= a and or cm "
    "dollars percent answer answer: \\boxed{ \\boxed{4} \\fbox{4} \\frac{1}{2} \\text{"
)
PROSE = st.lists(
    st.sampled_from(
        [*PIECES.split(), " ", " ", "\n", "\u00a0", "The answer is ", "final answer is ", " I hope it is "]
    ),
    max_size=6,
).map("".join)
FORMULAS = [("", ""), ("$", "$"), ("$$", "$$"), ("\\(", "\\)"), ("\\[\n", "\n\\]"), ("**", "**")]


@given(PROSE, st.sampled_from([*FORMULAS, None]), NUMBERS, PROSE, st.none() | NUMBERS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_number_that_is_compared_without_math_verify_gets_its_verdict(prefix, formula, number, suffix, answer):
    opening, closing = formula or ("", "")
    middle = f"{opening}\\boxed{{{number}}}{closing}" if formula else f"#### {number}"
    extract, gold = final_answer.extract(prefix + middle + suffix), answer or number
    result, expected = math_answers._number(extract or ""), math_answers._number(gold)
    assume(result is not None and expected is not None)
    math_answers.warm()
    assert math_answers._same(gold, math_answers._gold(gold), extract) is (result == expected)


@pytest.mark.parametrize(("form", "every"), [("#### {}", 1), ("so \\boxed{{{}}} dollars.", 1), ("{}", 10)])
def test_gsm8k_is_scored_without_math_verify_and_without_a_mistake(score, no_child, form, every):
    assert len(GSM8K) == 1319
    golds = GSM8K[::every]
    wrong_answers = [str(int(gold.replace(",", "")) + 1) for gold in golds]
    assert [gold for gold in golds if score(form.format(gold), f"#### {gold}") != 1.0] == []
    assert [
        gold for gold, wrong in zip(golds, wrong_answers, strict=True) if score(form.format(wrong), gold) != 0.0
    ] == []


@pytest.mark.parametrize(
    "form", ["48/2 = 24, so the answer is {}.", "so she makes ${} a day", "It is $\\boxed{{{}}}$%"]
)
def test_gsm8k_is_scored_by_math_verify_without_a_mistake(score, here, form):
    golds = GSM8K[::60]
    wrong_answers = [str(int(gold.replace(",", "")) + 1) for gold in golds]
    assert [gold for gold in golds if score(form.format(gold), f"#### {gold}") != 1.0] == []
    assert [
        gold for gold, wrong in zip(golds, wrong_answers, strict=True) if score(form.format(wrong), gold) != 0.0
    ] == []


# --- limits


def test_it_works_in_any_thread(score):
    scores = []
    thread = threading.Thread(
        target=lambda: scores.extend(score(item, "x+1") for item in ("\\boxed{1+x}", "\\boxed{(x!)!^{10^{9}}}"))
    )
    thread.start()
    thread.join(60)
    assert scores == [1.0, 0.0]


@pytest.mark.parametrize(
    "question",
    [
        lambda: 9**9**9 > 0,
        lambda: len([bytearray(1 << 28) for _ in range(8)]) == 8,
        lambda: os.kill(os.getpid(), signal.SIGSEGV) is None,
        lambda: 1 / 0,
        lambda: os._exit(0),
    ],
    ids=["never ends", "takes all memory", "crashes", "raises", "leaves"],
)
def test_a_question_that_ends_badly_has_no_answer_and_leaves_no_process(question, monkeypatch):
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.1)
    children, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])
    assert limits.limited(question) is None
    assert limits.limited(lambda: True) is True
    assert limits.limited(lambda: False) is False
    assert len(children) == 3
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_a_question_that_did_not_get_the_processor_is_a_failure_not_an_answer(monkeypatch):
    monkeypatch.setattr(limits, "WALL_SECONDS", 0.05)
    with pytest.raises(TimeoutError, match=r"of the processor in 0.05 s"):
        limits.limited(lambda: time.sleep(60) is None)


def test_of_many_empty_boxes_no_text_is_read_again_and_again():
    assert final_answer.extract("x \\boxed{} " * 20_000) is None
    assert final_answer.extract("\\boxed{42}" + " " * 50 + "\\boxed{}") is None


def test_a_question_that_had_the_processor_for_long_has_no_answer_when_its_time_by_the_clock_is_over(monkeypatch):
    monkeypatch.setattr(limits, "CPU_SECONDS", 600.0)
    monkeypatch.setattr(limits, "WALL_SECONDS", 0.3)
    monkeypatch.setattr(limits, "FAIR_SECONDS", 0.0)
    assert limits.limited(lambda: 9**9**9 > 0) is None


def test_a_child_that_cannot_be_limited_is_a_failure_not_an_answer(monkeypatch):
    monkeypatch.setattr(limits.resource, "setrlimit", lambda *_: 1 / 0)
    with pytest.raises(ChildProcessError, match="did not start"):
        limits.limited(lambda: True)
