//! Tables of values that many entries share: each is written once, in rising order, and named by its index.

use super::DecodeError;
use super::numbers::{Reader, write_count};

/// The table of a writer.
pub(super) struct Table<T>(Vec<T>);

impl<T: Copy + Ord> Table<T> {
    pub(super) fn of(values: impl Iterator<Item = T>) -> Self {
        let mut values: Vec<_> = values.collect();
        values.sort_unstable();
        values.dedup();
        Self(values)
    }

    pub(super) fn write(&self, out: &mut Vec<u8>, mut write: impl FnMut(&mut Vec<u8>, T)) {
        write_count(out, self.0.len());
        self.0.iter().for_each(|value| write(out, *value));
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The index of a value, which is in the table.
    pub(super) fn index(&self, value: T) -> usize {
        self.0.binary_search(&value).unwrap_or_else(|at| at)
    }

    pub(super) fn write_index(&self, out: &mut Vec<u8>, value: T) {
        write_count(out, self.index(value));
    }
}

/// The table of a reader, which sees to it that each value is used.
pub(super) struct Known<T> {
    field: &'static str,
    values: Vec<T>,
    is_used: Vec<bool>,
}

impl<T: Copy> Known<T> {
    pub(super) const fn new(field: &'static str) -> Self {
        Self { field, values: Vec::new(), is_used: Vec::new() }
    }

    pub(super) const fn len(&self) -> usize {
        self.values.len()
    }

    pub(super) fn push(&mut self, value: T) {
        self.values.push(value);
        self.is_used.push(false);
    }

    /// Reads the index of a value: that, and the value.
    pub(super) fn read(&mut self, reader: &mut Reader<'_>) -> Result<(usize, T), DecodeError> {
        let index = reader.number(self.field)?;
        self.take(reader, index)
    }

    /// The same of an index that has been read.
    pub(super) fn take(
        &mut self,
        reader: &Reader<'_>,
        index: u64,
    ) -> Result<(usize, T), DecodeError> {
        let (at, value) = self.find(reader, index)?;
        self.is_used[at] = true;
        Ok((at, value))
    }

    /// The same of one that is used once.
    pub(super) fn read_once(&mut self, reader: &mut Reader<'_>) -> Result<(usize, T), DecodeError> {
        let index = reader.number(self.field)?;
        let is_used = |at| self.is_used.get(at).copied().unwrap_or(false);
        if usize::try_from(index).is_ok_and(is_used) {
            return Err(reader.malformed(self.field, index, "one that was not named before"));
        }
        self.take(reader, index)
    }

    /// Changes what is known of a value.
    pub(super) fn set(&mut self, at: usize, value: T) {
        self.values[at] = value;
    }

    /// The value of an index, which does not count as used.
    pub(super) fn look(&self, reader: &mut Reader<'_>) -> Result<(usize, T), DecodeError> {
        let index = reader.number(self.field)?;
        self.find(reader, index)
    }

    fn find(&self, reader: &Reader<'_>, index: u64) -> Result<(usize, T), DecodeError> {
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        let value = self.values.get(at).map(|value| (at, *value));
        let expected = || format!("below {}", self.values.len());
        value.ok_or_else(|| reader.malformed(self.field, index, expected()))
    }

    /// Whether each value was used.
    pub(super) fn end(&self, reader: &Reader<'_>) -> Result<(), DecodeError> {
        match self.is_used.iter().position(|is_used| !is_used) {
            None => Ok(()),
            Some(at) => Err(reader.malformed(self.field, at as u64, "to be named by an entry")),
        }
    }
}
