//! Plots, as SVG.

use std::path::Path;

use plotters::prelude::*;

use super::table::number;

/// One line of a plot.
pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) points: Vec<(f64, f64)>,
}

const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 90, 181), RGBColor(220, 50, 32), RGBColor(90, 90, 90), RGBColor(230, 159, 0)];

/// Draws several lines. `log` means that the horizontal axis is logarithmic.
pub(crate) fn lines(path: &Path, title: &str, axes: (&str, &str), lines: &[Line], log: bool) {
    draw(path, title, axes, lines, log).expect("a plot");
}

/// Returns the share of values up to each value, without the last thousandth.
pub(crate) fn distribution(name: &'static str, values: &[f64]) -> Line {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let all = sorted.len().max(1);
    let step = (all / 500).max(1);
    let shown = sorted.iter().enumerate().take(all - all / 1000).step_by(step);
    let points = shown.map(|(i, value)| (*value, (i + 1) as f64 / all as f64)).collect();
    Line { name, points }
}

fn draw(
    path: &Path,
    title: &str,
    (x, y): (&str, &str),
    lines: &[Line],
    log: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let all = || lines.iter().flat_map(|line| &line.points);
    let highest = |of: fn(&(f64, f64)) -> f64| all().map(of).fold(0.0, f64::max).max(1e-9);
    let lowest = all().map(|point| point.0).fold(f64::INFINITY, f64::min);
    let (right, top) = (highest(|point| point.0), highest(|point| point.1) * 1.05);

    let area = SVGBackend::new(path, (860, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut builder = ChartBuilder::on(&area);
    builder.caption(title, ("sans-serif", 20)).margin(14);
    builder.x_label_area_size(44).y_label_area_size(76);
    // The two charts have different types; a macro saves a second copy.
    macro_rules! fill {
        ($chart:expr) => {{
            let mut chart = $chart;
            let label = |value: &f64| number(*value);
            let mut mesh = chart.configure_mesh();
            mesh.x_desc(x).y_desc(y).x_label_formatter(&label).y_label_formatter(&label);
            mesh.light_line_style(WHITE).draw()?;
            for (line, colour) in lines.iter().zip(COLOURS) {
                chart
                    .draw_series(LineSeries::new(line.points.clone(), colour.stroke_width(2)))?
                    .label(line.name)
                    .legend(move |(x, y)| {
                        PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2))
                    });
            }
            let mut labels = chart.configure_series_labels();
            let place =
                if log { SeriesLabelPosition::UpperLeft } else { SeriesLabelPosition::LowerRight };
            labels.position(place).background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
        }};
    }
    if log {
        fill!(builder.build_cartesian_2d((lowest..right).log_scale().base(2.0), 0.0..top)?);
    } else {
        fill!(builder.build_cartesian_2d(0.0..right, 0.0..top)?);
    }
    area.present()?;
    Ok(())
}
