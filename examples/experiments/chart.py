"""Curves of several runs over each other, as SVG that needs no script."""
import dataclasses
import html
import math

WIDTH, HEIGHT = 560, 236
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 10, 32
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MOST_TICKS, MOST_STRIPES, MOST_HUES = 5, 120, 8


@dataclasses.dataclass
class Curve:
    name: str
    number: int  # of its hue; -1: what is allowed
    values: list  # one a step; None where there is none


def round_up(value):
    """The smallest of 1, 2, 5 times a power of ten that is at least `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((factor * power for factor in (1, 2, 5) if value <= factor * power * (1 + 1e-9)), 10 * power)


class Linear:
    def __init__(self, low, high):
        if high <= low:
            margin = max(abs(low) * 0.1, 1e-6)
            low, high = low - margin, high + margin
        step = round_up((high - low) / (MOST_TICKS - 1))
        self.low, self.high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        self.ticks = [self.low + i * step for i in range(round((self.high - self.low) / step) + 1)]
        self.decimals = max(0, -math.floor(math.log10(step) + 1e-9))

    def place(self, value):
        return (value - self.low) / (self.high - self.low)

    def label(self, tick):
        return f"{tick:.{self.decimals}f}"


class Logarithmic:
    def __init__(self, low, high):
        self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(high))
        if self.high == self.low:
            self.high += 1
        stride = math.ceil((self.high - self.low) / MOST_TICKS)
        self.ticks = [10.0 ** power for power in range(self.low, self.high + 1, stride)]

    def place(self, value):
        # What is 0 lies on the axis: two runs that are equal there.
        return max(0.0, (math.log10(value) - self.low) / (self.high - self.low)) if value > 0 else 0.0

    def label(self, tick):
        return f"{tick:.0e}".replace("e-0", "e-").replace("e+0", "e")


def line(curve, x, y, style):
    points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(curve.values) if value is not None)
    return f'<polyline class="{style}" points="{points}"/>'


def grid(axis, steps, x, y):
    base = TOP + PLOT_HEIGHT
    parts = [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
             f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{axis.label(tick)}</text>'
             for tick in axis.ticks]
    stride = max(1, int(round_up(max(steps - 1, 1) / 7)))
    marks = sorted({1, *range(stride, steps + 1, stride)}) if stride > 1 else range(1, steps + 1)
    parts += [f'<line class="axis" x1="{x(step - 1):.1f}" x2="{x(step - 1):.1f}" y1="{base}" y2="{base + 4}"/>'
              f'<text x="{x(step - 1):.1f}" y="{base + 18}" text-anchor="middle">{step}</text>' for step in marks]
    return "".join(parts) + (f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
                             f'<text x="{LEFT - 8}" y="{base + 18}" text-anchor="end">step</text>')


def stripes(curves, steps, x):
    """Invisible; each shows all curves' values when pointed at."""
    count = min(steps, MOST_STRIPES)
    width = PLOT_WIDTH / count
    parts = []
    for stripe in range(count):
        i = 0 if count == 1 else (steps - 1) * stripe // (count - 1)
        rows = [f"{curve.name}: {curve.values[i]:.7g}" for curve in curves
                if i < len(curve.values) and curve.values[i] is not None]
        text = html.escape("\n".join([f"step {i + 1}", *rows]))
        parts.append(f'<g class="hover"><title>{text}</title><rect x="{x(i) - width / 2:.1f}" y="{TOP}" '
                     f'width="{width:.1f}" height="{PLOT_HEIGHT}"/></g>')
    return "".join(parts)


def style_of(curve, first):
    if curve.number < 0:
        return "allowed"
    # The first one is broad and pale, so that those on top of it are seen.
    return f"curve h{curve.number % MOST_HUES}" + (" first" if first else " second" if curve.number >= MOST_HUES else "")


def svg(title, curves, logarithmic=False):
    """`curves` over the steps, from step 1. Values that are None are left out."""
    known = [value for curve in curves for value in curve.values if value is not None]
    if logarithmic:
        known = [value for value in known if value > 0]
    if not known:
        return '<p class="empty">No difference at any step.</p>' if logarithmic else '<p class="empty">no finite values</p>'
    axis = (Logarithmic if logarithmic else Linear)(min(known), max(known))
    steps = max(len(curve.values) for curve in curves)

    def x(i):
        return LEFT + (PLOT_WIDTH * i / (steps - 1) if steps > 1 else PLOT_WIDTH / 2)

    def y(value):
        return TOP + (1 - axis.place(value)) * PLOT_HEIGHT

    drawn = "".join(line(curve, x, y, style_of(curve, curve.number == 0 and not logarithmic)) for curve in curves)
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
            f'{grid(axis, steps, x, y)}{drawn}{stripes(curves, steps, x)}</svg>')
