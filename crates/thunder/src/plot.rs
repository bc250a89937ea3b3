//! Plots as text.

use std::collections::BTreeMap;
use std::fmt::Write;

/// A named series of points, all above 0.
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

const COLUMNS: usize = 65;
const ROWS: usize = 13;
/// Columns between two ticks of the horizontal axis, enough for their labels.
const TICK_COLUMNS: f64 = 7.0;
/// One mark per series: enough for every algorithm over every transport.
const MARKS: [char; 20] =
    ['●', '○', '▲', '△', '■', '□', '◆', '◇', '▼', '▽', '★', '☆', '+', '×', 'a', 'b', 'c', 'd', 'e', 'f'];
/// The mark where several series have a point.
const SHARED: char = '✱';
const LINE: char = '·';

/// A logarithmic axis from one whole power of `base` to another.
struct Axis {
    base: f64,
    low: f64,
    powers: f64,
    cells: usize,
}

impl Axis {
    fn new(base: f64, values: impl Iterator<Item = f64> + Clone, cells: usize) -> Self {
        let log = |value: f64| value.log(base);
        let low = log(values.clone().fold(f64::INFINITY, f64::min)).floor();
        let high = log(values.fold(0.0, f64::max)).ceil();
        Self { base, low, powers: (high - low).max(1.0), cells }
    }

    /// Position of a value, from 0 to the last cell.
    fn place(&self, value: f64) -> f64 {
        (value.log(self.base) - self.low) / self.powers * (self.cells - 1) as f64
    }

    /// Cell and value of every `step`th power.
    fn ticks(&self, step: usize) -> impl Iterator<Item = (usize, f64)> {
        (0..=self.powers as usize).step_by(step).map(|power| {
            let value = self.base.powf(self.low + power as f64);
            (self.place(value).round() as usize, value)
        })
    }
}

/// Draws the series in one plot with logarithmic axes: powers of 10 upwards, powers of 2 to the
/// right, labelled by `label`. Returns an empty text if there are no points.
pub fn logarithmic(series: &[Series], label: impl Fn(f64) -> String) -> String {
    let points = series.iter().flat_map(|series| series.points.iter().copied());
    if points.clone().next().is_none() {
        return String::new();
    }
    let across = Axis::new(2.0, points.clone().map(|(x, _)| x), COLUMNS);
    let up = Axis::new(10.0, points.map(|(_, y)| y), ROWS);
    let cells = draw(series, &across, &up);
    let upwards: BTreeMap<usize, f64> = up.ticks((up.powers as usize).div_ceil(ROWS - 1)).collect();
    let mut text = String::new();
    for (row, cells) in cells.chunks(COLUMNS).enumerate().rev() {
        let (value, edge) =
            upwards.get(&row).map_or((String::new(), '│'), |value| (value.to_string(), '┤'));
        let line: String = cells.iter().collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{value:>10} {edge}{}", line.trim_end());
    }
    let (mut edge, mut labels) = (['─'; COLUMNS], String::new());
    for (column, value) in across.ticks((TICK_COLUMNS * across.powers / COLUMNS as f64).ceil() as usize) {
        edge[column] = '┬';
        let _ = write!(labels, "{:1$}{2}", "", column.saturating_sub(labels.len()), label(value));
    }
    let _ = writeln!(text, "{:11}└{}\n{:12}{labels}", "", edge.into_iter().collect::<String>(), "");
    for (series, mark) in series.iter().zip(MARKS.into_iter().cycle()) {
        let _ = writeln!(text, "{:12}{mark} {}", "", series.name);
    }
    if cells.contains(&SHARED) {
        let _ = writeln!(text, "{:12}{SHARED} several", "");
    }
    text
}

/// Draws lines, then marks on top of them. Rows are in order from the bottom.
fn draw(series: &[Series], across: &Axis, up: &Axis) -> [char; COLUMNS * ROWS] {
    let mut cells = [' '; COLUMNS * ROWS];
    let cell = |x: f64, y: f64| y.round() as usize * COLUMNS + x.round() as usize;
    let places: Vec<Vec<(f64, f64)>> = series
        .iter()
        .map(|series| {
            let mut places: Vec<_> =
                series.points.iter().map(|(x, y)| (across.place(*x), up.place(*y))).collect();
            places.sort_by(|left, right| left.0.total_cmp(&right.0));
            places
        })
        .collect();
    for pair in places.iter().flat_map(|places| places.windows(2)) {
        let [(from_x, from_y), (to_x, to_y)] = [pair[0], pair[1]];
        for column in from_x.round() as usize..=to_x.round() as usize {
            let share = ((column as f64 - from_x) / (to_x - from_x).max(1.0)).clamp(0.0, 1.0);
            cells[cell(column as f64, from_y + share * (to_y - from_y))] = LINE;
        }
    }
    for (places, mark) in places.iter().zip(MARKS.into_iter().cycle()) {
        for (x, y) in places {
            let found = &mut cells[cell(*x, *y)];
            *found = if [' ', LINE, mark].contains(found) { mark } else { SHARED };
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(series: &[(&str, &[(f64, f64)])]) -> String {
        let series =
            series.iter().map(|(name, points)| Series { name: (*name).to_owned(), points: points.to_vec() });
        logarithmic(&series.collect::<Vec<_>>(), |value| value.to_string())
    }

    #[test]
    fn equal_factors_are_equal_distances() {
        let points = [(1.0, 0.01), (16.0, 0.1), (256.0, 1.0), (4096.0, 10.0)];
        let text = plot(&[("up", &points)]);
        let marks: Vec<(usize, usize)> = text
            .lines()
            .enumerate()
            .take(ROWS)
            .filter_map(|(row, line)| Some((row, line.chars().position(|letter| letter == MARKS[0])?)))
            .collect();
        // 11 columns of labels and the edge come first.
        assert_eq!(marks, [(0, 76), (4, 55), (8, 33), (12, 12)], "{text}");
        for (row, label) in [(0, "10 ┤"), (4, "1 ┤"), (8, "0.1 ┤"), (12, "0.01 ┤")] {
            assert!(text.lines().nth(row).unwrap().trim_start().starts_with(label), "{text}");
        }
        assert!(
            text.contains(" 1          4  ") && text.contains(" 4096\n") && text.ends_with(" ● up\n"),
            "{text}"
        );
    }

    #[test]
    fn points_in_one_place_share_a_mark_that_the_legend_explains() {
        let text = plot(&[("a", &[(8.0, 1.0), (64.0, 2.0)]), ("b", &[(8.0, 5.0), (64.0, 2.0)])]);
        assert_eq!(["●", "○", "✱"].map(|mark| text.matches(mark).count()), [2, 2, 2], "{text}");
    }

    #[test]
    fn one_point_makes_a_plot_and_no_points_an_empty_text() {
        assert_eq!(plot(&[("a", &[(8192.0, 0.3)])]).matches('●').count(), 2);
        assert_eq!(plot(&[]), "");
        assert_eq!(plot(&[("a", &[])]), "");
    }
}
