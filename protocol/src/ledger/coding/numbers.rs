//! Numbers as bytes: groups of seven bits, the lowest first; all but the last have the highest bit set.

use std::ops::RangeInclusive;

use super::DecodeError;

pub(super) fn write_number(out: &mut Vec<u8>, mut number: u64) {
    while number > 127 {
        out.push(number.to_le_bytes()[0] | 128);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

pub(super) fn write_count(out: &mut Vec<u8>, count: usize) {
    write_number(out, count as u64);
}

/// Writes how far a number is from another, to either side: 0, −1, 1, −2 … are 0, 1, 2, 3 …
pub(super) fn write_near(out: &mut Vec<u8>, number: u64, other: u64) {
    let distance = number.wrapping_sub(other).cast_signed();
    write_number(out, (distance << 1 ^ distance >> 63).cast_unsigned());
}

/// Reads numbers one after the other.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the last number began.
    began: usize,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, began: 0 }
    }

    pub(super) const fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(super) const fn at(&self) -> usize {
        self.at
    }

    /// What was read since it was there.
    pub(super) fn since(&self, at: usize) -> &'a [u8] {
        &self.bytes[at..self.at]
    }

    /// That the last number that was read is not as it must be.
    pub(super) fn malformed(
        &self,
        field: &'static str,
        value: u64,
        expected: impl Into<String>,
    ) -> DecodeError {
        DecodeError::Malformed { at: self.began, field, value, expected: expected.into() }
    }

    pub(super) fn bytes<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let truncated = DecodeError::Truncated { length: self.bytes.len() };
        let bytes = self.bytes[self.at..].first_chunk().ok_or(truncated)?;
        self.began = self.at;
        self.at += N;
        Ok(*bytes)
    }

    /// Reads a number in the only way in which it is written: with as few bytes as it needs.
    pub(super) fn number(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        let (start, mut number) = (self.at, 0);
        for shift in (0..u64::BITS).step_by(7) {
            let [byte] = self.bytes()?;
            self.began = start;
            let bits = u64::from(byte & 127);
            if shift == 63 && bits > 1 || byte == 0 && shift > 0 {
                return Err(self.malformed(field, number, "the fewest bytes, of at most 64 bits"));
            }
            number |= bits << shift;
            if byte < 128 {
                return Ok(number);
            }
        }
        Err(self.malformed(field, number, "at most ten bytes"))
    }

    pub(super) fn within(
        &mut self,
        field: &'static str,
        range: RangeInclusive<u64>,
    ) -> Result<u64, DecodeError> {
        let number = self.number(field)?;
        if range.contains(&number) {
            return Ok(number);
        }
        let expected = format!("{} to {}", range.start(), range.end());
        Err(self.malformed(field, number, expected))
    }

    /// The same of one that has 32 bits.
    pub(super) fn within_u32(
        &mut self,
        field: &'static str,
        range: RangeInclusive<u32>,
    ) -> Result<u32, DecodeError> {
        let number = self.within(field, (*range.start()).into()..=(*range.end()).into())?;
        u32::try_from(number).map_err(|_| self.malformed(field, number, "32 bits"))
    }

    /// Reads how many follow that have at least so many bytes each.
    pub(super) fn count(&mut self, field: &'static str, least: usize) -> Result<u64, DecodeError> {
        let count = self.number(field)?;
        let most = (self.left() / least) as u64;
        if count <= most {
            return Ok(count);
        }
        Err(self.malformed(
            field,
            count,
            format!("at most {most} in the {} bytes left", self.left()),
        ))
    }

    /// Reads a number that is this far above the one before.
    pub(super) fn above(&mut self, field: &'static str, before: u64) -> Result<u64, DecodeError> {
        let distance = self.number(field)?;
        let sum = before.checked_add(distance);
        sum.ok_or_else(|| self.malformed(field, distance, format!("at most {}", u64::MAX - before)))
    }

    /// Reads what [`write_near`] writes.
    pub(super) fn near(&mut self, field: &'static str, other: u64) -> Result<u64, DecodeError> {
        let folded = self.number(field)?;
        let distance = (folded >> 1).cast_signed() ^ -(folded & 1).cast_signed();
        Ok(other.wrapping_add(distance.cast_unsigned()))
    }

    /// Reads the end.
    pub(super) fn end(&mut self) -> Result<(), DecodeError> {
        self.began = self.at;
        match self.left() {
            0 => Ok(()),
            left => Err(self.malformed("number of bytes left", left as u64, "0")),
        }
    }
}

/// The entries of a list, each of which is above the one before.
pub(super) struct Rising<T> {
    field: &'static str,
    last: Option<T>,
}

impl<T: Copy + Ord> Rising<T> {
    pub(super) const fn new(field: &'static str) -> Self {
        Self { field, last: None }
    }

    /// Takes the next one; `value`: what an error shows of it.
    pub(super) fn next(
        &mut self,
        reader: &Reader<'_>,
        next: T,
        value: u64,
    ) -> Result<(), DecodeError> {
        if self.last.replace(next).is_some_and(|last| last >= next) {
            return Err(reader.malformed(self.field, value, "one above that before it"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{DecodeError, Reader, write_near, write_number};

    #[test]
    fn a_number_is_read_back_as_it_was_written() {
        for number in [0, 1, 127, 128, 16_383, 16_384, u64::MAX / 2, u64::MAX - 1, u64::MAX] {
            let mut out = Vec::new();
            write_number(&mut out, number);
            assert_eq!(out.len(), (64 - (number | 1).leading_zeros() as usize).div_ceil(7));
            let mut reader = Reader::new(&out);
            assert_eq!(reader.number("n"), Ok(number));
            assert_eq!(reader.left(), 0);
        }
    }

    #[test]
    fn numbers_near_another_are_short_on_either_side() {
        let mut out = Vec::new();
        let pairs = [(5, 5), (68, 5), (5, 69), (0, u64::MAX), (u64::MAX, 0), (1 << 63, 0)];
        for (number, other) in pairs {
            write_near(&mut out, number, other);
        }
        assert_eq!(out[..3], [0, 126, 127]);
        let mut reader = Reader::new(&out);
        for (number, other) in pairs {
            assert_eq!(reader.near("n", other), Ok(number));
        }
    }

    #[test]
    fn a_number_has_one_form() {
        let expected = |text: &[u8]| match Reader::new(text).number("n") {
            Err(DecodeError::Malformed { at, .. }) => at,
            other => panic!("{text:?}: {other:?}"),
        };
        assert_eq!(expected(&[128, 0]), 0);
        assert_eq!(expected(&[255, 128, 0]), 0);
        assert_eq!(expected(&[255, 255, 255, 255, 255, 255, 255, 255, 255, 2]), 0);
        assert_eq!(expected(&[255; 11]), 0);
        assert_eq!(Reader::new(&[128]).number("n"), Err(DecodeError::Truncated { length: 1 }));
    }
}
