//! What goes to the terminal: plain when the output is no terminal, and nothing that panics on a closed pipe.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvxfer_core::{Error, ErrorKind, Result};
use serde::Serialize;

/// Escape sequences, used on terminals only.
pub(crate) const BOLD: &str = "1";
pub(crate) const DIM: &str = "2";
pub(crate) const RED: &str = "31";
pub(crate) const GREEN: &str = "32";
pub(crate) const YELLOW: &str = "33";

/// Prints a line. A reader that went away is no reason to fail.
pub(crate) fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Prints a value as one line of JSON.
pub(crate) fn json_line<T: Serialize>(value: &T) -> Result<()> {
    let text = serde_json::to_string(value)
        .map_err(|error| Error::new(ErrorKind::Internal, "a result as JSON").because(error.to_string()))?;
    line(&text);
    Ok(())
}

/// Waits for a line on standard input.
pub(crate) fn line_from_input() -> Result<()> {
    let mut line = String::new();
    match std::io::stdin().read_line(&mut line) {
        Ok(0) => Err(Error::new(ErrorKind::Closed, "standard input")
            .because("it ended before the last repetition")
            .remedy("give one line for each")),
        Ok(_) => Ok(()),
        Err(error) => Err(Error::new(ErrorKind::Transport, "standard input").because(error.to_string())),
    }
}

/// Colours the text if the output is a terminal that may be coloured.
pub(crate) fn paint(code: &str, text: &str) -> String {
    if std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

/// Of what an endpoint explains of a peer, the part about the path.
pub(crate) fn path_of(explained: &str) -> Vec<&str> {
    explained
        .lines()
        .skip(1)
        .take_while(|line| !line.starts_with("endpoint "))
        .filter(|line| !line.trim().is_empty())
        .collect()
}

/// A number of bytes in the unit that reads best.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value.fract() == 0.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// A duration with three digits that matter.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 0.1 => format!("{:.0} ms", s * 1e3),
        s if s >= 0.001 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

/// Bytes over a duration in GB/s (of 1e9 bytes).
pub(crate) fn rate(bytes: u64, duration: Duration) -> String {
    format!("{:.2} GB/s", bytes as f64 / duration.as_secs_f64() / 1e9)
}

/// A progress bar on standard error; it draws nothing if that is no terminal.
pub(crate) fn progress(length: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{msg:<28} [{bar:32}] {pos}/{len} {elapsed} (left {eta})") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_read_well() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(160 << 20), "160 MiB");
        assert_eq!(bytes(1_700_000_000), "1.6 GiB");
        assert_eq!(duration(Duration::from_micros(1500)), "1.50 ms");
        assert_eq!(duration(Duration::from_nanos(2500)), "2.5 µs");
        assert_eq!(rate(2_000_000_000, Duration::from_secs(1)), "2.00 GB/s");
    }
}
